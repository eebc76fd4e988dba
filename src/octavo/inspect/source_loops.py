"""Owns the match between a loop as written and the machine loops that the compiler made of it.

Finds `for` and `while` in the source, the PTX and SASS loops that belong to each, and how many
source iterations one trip of a machine loop does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from octavo.inspect.asm import Assembly
from octavo.inspect.flow import Loop, written
from octavo.inspect.sass import SassKernel, Step
from octavo.kernels.matmul.registry import parse_constants

_HEADER = re.compile(r"\b(for|while)\s*\(")
_INCREMENT = re.compile(r";\s*(?:\+\+\w+|\w+\+\+|\w+\s*\+=\s*(\w+))\s*[,)]")
_STEP = re.compile(r"(U?R\d+), \1, (-?0x[0-9a-f]+)\b")  # of a counter
# The work that tells how often a loop body was copied, the most telling first; in SASS, and in PTX.
_WORK = {
    "HGMMA": "wgmma.mma_async", "QGMMA": "wgmma.mma_async", "HMMA": "mma.sync",
    "FFMA": "fma.rn.f32", "FADD": "add.f32", "FMUL": "mul.f32",
    "UTMALDG": "cp.async.bulk.tensor",
    "LDG": "ld.global", "LDS": "ld.shared", "STG": "st.global", "STS": "st.shared",
}  # fmt: skip


@dataclass(frozen=True)
class SourceLoop:
    """A loop as written. `increment` of its counter, when the header says so."""

    file: str
    line: int
    last_line: int
    text: str
    increment: int | None


@dataclass(frozen=True)
class Piece:
    """Machine code of one source loop: a loop, or a straight run that does some iterations once.

    `ends` are its first and last instruction. `work` counts those of the telling kind (the `counted`
    of its `Unrolling`) in it, so ratios of `work` are ratios of iterations.
    """

    ends: tuple[Step, Step]
    work: int
    loop: Loop | None = None


@dataclass(frozen=True)
class Unrolling:
    """What became of one source loop: `main` is its largest machine loop, `tails` do what is left over.

    `factor` is the iterations per trip of the main loop, `ptx_factor` the same of the PTX that it was
    made of, on `ptx_lines` from first to last; either is None when the code does not tell. Without a
    main loop nothing is left of the source loop.
    """

    counted: str
    main: Piece | None = None
    tails: tuple[Piece, ...] = ()
    factor: int | None = None
    ptx_factor: int | None = None
    ptx_lines: tuple[int, ...] = ()


def source_loops(assembly: Assembly) -> list[SourceLoop]:
    """Loops as written in the files that the kernel's code comes from, if any code came of them."""
    steps = [*assembly.ptx, *assembly.sass.instructions]
    used = {where for step in steps for where in step.locations}
    found = []
    for file, lines in assembly.files.items():
        constants: dict[str, int] = {}
        with suppress(KeyError, ValueError):
            constants = parse_constants("\n".join(lines.values()))
        for number in sorted(lines):
            code = lines[number].split("//", 1)[0]
            if not _HEADER.search(code):
                continue
            last = _end_of_statement(lines, number)
            if any(w.file == file and number <= w.line <= last for w in used):
                step = _INCREMENT.search(code)
                name = step and (step.group(1) or "1")
                increment = int(name) if name and name.isdigit() else constants.get(name or "")
                found.append(SourceLoop(file, number, last, code.strip(), increment))
    return found


def _end_of_statement(lines: dict[int, str], first: int) -> int:
    """The last line of the loop that starts on `first`: its closing brace, or its one statement."""
    depth = 0
    for number in range(first, max(lines) + 1):
        for character in lines.get(number, "").split("//", 1)[0]:
            depth += (character in "({") - (character in ")}")
            if depth == 0 and character in ";}":
                return number
    return first


def owner(step: Step, loops: Sequence[SourceLoop]) -> SourceLoop | None:
    """The source loop that a step (or the loop that it closes) belongs to.

    The innermost file that has a loop around the step decides; in it, a lambda's body belongs to
    the innermost loop that calls it.
    """
    for file in dict.fromkeys(where.file for where in step.locations):
        lines = [where.line for where in step.locations if where.file == file]
        mine = [loop for loop in loops if loop.file == file]
        if around := [x for x in mine if any(x.line <= n <= x.last_line for n in lines)]:
            return min(around, key=lambda x: x.last_line - x.line)
    return None


def is_service(kernel: SassKernel, loop: Loop) -> bool:
    """Loops that nobody wrote as one: a barrier wait, or ptxas's loop over lanes around TMA."""
    body = [kernel.instructions[index] for index in loop.body]
    waits = any("PHASECHK" in step.opcode for step in body)
    wrapped = kernel.instructions[loop.last].starts("BRA.U.ANY")
    return wrapped or (waits and not any(step.root in _WORK for step in body))


def unrolling(assembly: Assembly, wanted: SourceLoop, loops: Sequence[SourceLoop]) -> Unrolling:
    """What became of one source loop."""
    steps = assembly.sass.instructions
    service = [x for x in assembly.sass_loops if is_service(assembly.sass, x)]
    owners = {x: owner(steps[x.last], loops) for x in assembly.sass_loops if x not in service}
    mine = [x for x, by in owners.items() if by == wanted]
    if not mine:
        return Unrolling("")
    # Loops that are left in the code; the others count as part of the loop around them.
    live = [x for x in loops if x in owners.values()]
    work = [s.root if s.root in _WORK and owner(s, live) == wanted else "" for s in steps]
    taken = frozenset[int]().union(*(x.body for x in mine))
    counted = next((root for root in _WORK if root in {work[i] for i in taken}), "")
    at = {i for i, root in enumerate(work) if counted and root == counted}
    pieces = [Piece((steps[x.first], steps[x.last]), len(at & x.body), x) for x in mine]
    # Straight runs, outside the loop's machine loops, that do some of its work once. Branches of
    # service loops do not end a run.
    quiet = frozenset[int]().union(*(x.body for x in service))
    runs: list[list[int]] = [[]]
    for index, step in enumerate(steps):
        if index in taken or (step.target is not None and index not in quiet):
            runs.append([])
        elif index in at:
            runs[-1].append(index)
    pieces += [Piece((steps[run[0]], steps[run[-1]]), len(run)) for run in runs if run]
    if counted:
        pieces = sorted((p for p in pieces if p.work), key=lambda p: p.ends[0].at)
    main = max((p for p in pieces if p.loop), key=lambda p: p.work)
    factor = _factor(steps, wanted, pieces)
    body = main.loop.body if main.loop else ()
    lines = [line for i in body if (line := steps[i].ptx_line)]
    span, ptx_factor = (min(lines), max(lines)) if lines else (), None
    if factor and main.work and span:
        copies = [s.starts(_WORK[counted]) for s in assembly.ptx if span[0] <= s.at <= span[1]]
        ptx_factor = factor * sum(copies) // main.work or None
    tails = tuple(p for p in pieces if p is not main and p.work < main.work)
    return Unrolling(counted, main, tails, factor, ptx_factor, span)


def _factor(steps: Sequence[Step], wanted: SourceLoop, pieces: Sequence[Piece]) -> int | None:
    works = {p.work for p in pieces if p.work}
    if len(works) > 1 and max(works) % min(works) == 0:
        return max(works) // min(works)
    widest = max(abs(_counter_step(steps, p.loop)) for p in pieces if p.loop)
    if wanted.increment and widest and widest % wanted.increment == 0:
        return widest // wanted.increment
    return None


def _counter_step(steps: Sequence[Step], loop: Loop) -> int:
    """By how much the counter that decides a loop moves in one trip; 0 if not found.

    Follows the branch's predicate to the comparison, and its register to an add of a constant. A
    counter is written once in the body, by its own step.
    """
    body = [steps[index] for index in sorted(loop.body)]
    guard = steps[loop.last].guard.lstrip("!")
    tests = [s for s in body if s.root in ("ISETP", "UISETP") and s.names[0] == guard]
    compared = tests[-1].names[1:] if tests else []
    for step in body:
        found = _STEP.match(step.operands) if step.root in ("IADD3", "VIADD", "UIADD3") else None
        if found and found[1] in compared and sum(found[1] in written(s) for s in body) == 1:
            value = int(found[2], 0)
            return value - 2**32 if value >= 2**31 else value
    return 0
