"""Owns the match between a loop as written and the machine loops that the compiler made of it.

Finds `for` and `while` in the source, the PTX and SASS loops that belong to each, and how many
source iterations one trip of a machine loop does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from octavo.inspect.asm import Assembly
from octavo.inspect.flow import Loop, written
from octavo.inspect.listing import Step
from octavo.inspect.sass import SassKernel
from octavo.kernels.matmul.registry import parse_constants

_HEADER = re.compile(r"\b(for|while)\s*\(")
_INCREMENT = re.compile(r";\s*(?:\+\+\w+|\w+\+\+|\w+\s*\+=\s*(\w+))\s*[,)]")
_IMMEDIATE = re.compile(r"-?(0x[0-9a-f]+|\d+)$")
# The work that tells how often a loop body was copied, the most telling first; in SASS, and in PTX.
_WORK = {
    "HGMMA": "wgmma.mma_async",
    "QGMMA": "wgmma.mma_async",
    "HMMA": "mma.sync",
    "FFMA": "fma.rn.f32",
    "FADD": "add.f32",
    "FMUL": "mul.f32",
    "UTMALDG": "cp.async.bulk.tensor",
    "LDG": "ld.global",
    "LDS": "ld.shared",
    "STG": "st.global",
    "STS": "st.shared",
}


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
    """What became of one source loop. `factor` is the iterations per trip of the largest loop.

    `ptx_factor` is the same of the PTX that this loop was made of, on `ptx_lines` from first to last.
    Either is None when the code does not tell. `pieces` is empty when no loop is left.
    """

    counted: str
    pieces: tuple[Piece, ...]
    factor: int | None
    ptx_factor: int | None = None
    ptx_lines: tuple[int, ...] = ()

    @property
    def main(self) -> Piece | None:
        return max((p for p in self.pieces if p.loop), key=lambda p: p.work, default=None)

    @property
    def tails(self) -> list[Piece]:
        most = self.main.work if self.main else 0
        return [p for p in self.pieces if p is not self.main and p.work < most]


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
    # Loops that are left in the code; the others count as part of the loop around them.
    live = [x for x in loops if x in owners.values()]
    work = [s.root if s.root in _WORK and owner(s, live) == wanted else "" for s in steps]
    total = {work[i] for x in mine for i in x.body}
    counted = next((root for root in _WORK if root in total), "")
    at = {i for i, root in enumerate(work) if counted and root == counted}
    pieces = [_piece(steps, sorted(at & x.body), x) for x in mine]
    if counted:
        # Straight runs, outside the loop's machine loops, that do some of its work once. Branches
        # of service loops do not end a run.
        taken = frozenset[int]().union(*(x.body for x in mine))
        quiet = frozenset[int]().union(*(x.body for x in service))
        runs: list[list[int]] = [[]]
        for index, step in enumerate(steps):
            if index in taken or (step.target is not None and index not in quiet):
                runs.append([])
            elif index in at:
                runs[-1].append(index)
        pieces += [_piece(steps, run) for run in runs if run]
        pieces = sorted((p for p in pieces if p.work), key=lambda p: p.ends[0].at)
    found = Unrolling(counted, tuple(pieces), _factor(steps, wanted, pieces))
    return _with_ptx(assembly, found) if found.main else found


def _with_ptx(assembly: Assembly, found: Unrolling) -> Unrolling:
    """Adds what the PTX of the main loop says: how many copies of the work the front end made."""
    main = found.main
    body = main.loop.body if main and main.loop else ()
    lines = [line for i in body if (line := assembly.sass.instructions[i].ptx_line)]
    if not (main and lines):
        return found
    span = min(lines), max(lines)
    factor = None
    if found.factor and main.work:
        name = _WORK[found.counted]
        copies = sum(s.starts(name) for s in assembly.ptx if span[0] <= s.at <= span[1])
        factor = found.factor * copies // main.work or None
    return replace(found, ptx_factor=factor, ptx_lines=span)


def _piece(steps: Sequence[Step], work: Sequence[int], loop: Loop | None = None) -> Piece:
    first, last = (loop.first, loop.last) if loop else (work[0], work[-1])
    return Piece((steps[first], steps[last]), len(work), loop)


def _factor(steps: Sequence[Step], wanted: SourceLoop, pieces: Sequence[Piece]) -> int | None:
    works = {p.work for p in pieces if p.work}
    if len(works) > 1 and max(works) % min(works) == 0:
        return max(works) // min(works)
    widest = max((abs(_counter_step(steps, p.loop)) for p in pieces if p.loop), default=0)
    if wanted.increment and widest and widest % wanted.increment == 0:
        return widest // wanted.increment
    return None


def _counter_step(steps: Sequence[Step], loop: Loop) -> int:
    """By how much the counter that decides a loop moves in one trip; 0 if not found.

    Follows the branch's predicate to the comparison, and its register to an add of a constant. A
    counter is written once in the body, by its own step.
    """
    guard = steps[loop.last].guard.lstrip("!")
    body = [steps[index] for index in sorted(loop.body)]
    compared: set[str] = set()
    for step in body:
        if step.root in ("ISETP", "UISETP") and step.names[0] == guard:
            compared = set(step.names[1:])
    for step in body:
        name, values = step.names[0], [n for n in step.names[2:] if _IMMEDIATE.match(n)]
        is_step = step.root in ("IADD3", "VIADD", "UIADD3") and step.names[1] == name
        if is_step and name in compared and values and sum(name in written(s) for s in body) == 1:
            value = int(values[0], 0)
            return value - 2**32 if value >= 2**31 else value
    return 0
