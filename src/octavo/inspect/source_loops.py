"""Owns the match between a loop as written and the machine loops that the compiler made of it.

Finds `for` and `while` in the source, the PTX and SASS loops that belong to each, and how many
source iterations one trip of a machine loop does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.inspect.asm import Assembly
from octavo.inspect.flow import Loop, written
from octavo.inspect.ptx import PtxInstruction, PtxKernel
from octavo.inspect.sass import Instruction, SassKernel
from octavo.kernels.matmul.registry import parse_constants

_HEADER = re.compile(r"\b(for|while)\s*\(")
_INCREMENT = re.compile(r";\s*(?:\+\+\w+|\w+\+\+|\w+\s*\+=\s*(\w+))\s*[,)]")
# The work that tells how often a loop body was copied, the most telling first. SASS names.
_WORK = ("HGMMA", "QGMMA", "HMMA", "FFMA", "FADD", "FMUL", "UTMALDG", "LDG", "LDS", "STG", "STS")
_PTX_WORK = {
    "wgmma.mma_async": "HGMMA",
    "mma.sync": "HMMA",
    "fma.rn.f32": "FFMA",
    "add.f32": "FADD",
    "mul.f32": "FMUL",
    "cp.async.bulk.tensor": "UTMALDG",
    "ld.global": "LDG",
    "ld.shared": "LDS",
    "st.global": "STG",
    "st.shared": "STS",
}


Steps = Sequence[Instruction] | Sequence[PtxInstruction]


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

    `first` and `last` are instruction indices. `work` counts the telling instruction in it (the
    `counted` of its `Unrolling`), so ratios of `work` are ratios of iterations.
    """

    is_loop: bool
    first: int
    last: int
    work: int
    loop: Loop | None = None


@dataclass(frozen=True)
class Unrolling:
    """One source loop in one listing. `factor` is the iterations per trip of the largest loop.

    None when the listing does not tell. `pieces` is empty when no loop is left.
    """

    counted: str
    pieces: tuple[Piece, ...]
    factor: int | None

    @property
    def main(self) -> Piece | None:
        return max((p for p in self.pieces if p.is_loop), key=lambda p: p.work, default=None)

    @property
    def tails(self) -> list[Piece]:
        return [p for p in self.pieces if p is not self.main and p.work < (self.main or p).work]


def source_loops(assembly: Assembly) -> list[SourceLoop]:
    """Loops as written in the files that the kernel's code comes from, if any code came of them."""
    used = {w for s in assembly.ptx.instructions for w in s.locations()}
    used |= {w for s in assembly.sass.instructions for w in s.locations()}
    found = []
    for file, lines in assembly.files.items():
        constants = _constants(lines)
        for number in sorted(lines):
            code = lines[number].split("//", 1)[0]
            if not _HEADER.search(code):
                continue
            last = _end_of_statement(lines, number)
            if any(w.file == file and number <= w.line <= last for w in used):
                found.append(
                    SourceLoop(file, number, last, code.strip(), _increment(code, constants))
                )
    return found


def _constants(lines: dict[int, str]) -> dict[str, int]:
    try:
        return parse_constants("\n".join(lines[n] for n in sorted(lines)))
    except (ValueError, KeyError):
        return {}


def _increment(code: str, constants: dict[str, int]) -> int | None:
    found = _INCREMENT.search(code)
    if not found:
        return None
    step = found.group(1)
    if step is None:
        return 1
    return int(step) if step.isdigit() else constants.get(step)


def _end_of_statement(lines: dict[int, str], first: int) -> int:
    """The last line of the loop that starts on `first`: its closing brace, or its one statement."""
    braces = parentheses = 0
    opened = False
    for number in range(first, max(lines) + 1):
        code = lines.get(number, "").split("//", 1)[0]
        for character in code:
            parentheses += (character == "(") - (character == ")")
            braces += (character == "{") - (character == "}")
            opened |= character == "{"
            if parentheses == 0 and (character == ";" or (opened and braces == 0)) and braces == 0:
                return number
    return first


def owner(step: Instruction | PtxInstruction, loops: Sequence[SourceLoop]) -> SourceLoop | None:
    """The source loop that a step (or the loop that it closes) belongs to.

    Of the files on its chain of inlined calls the innermost that has a loop around counts; of all
    lines of the chain in that file, the tightest loop around any. All, because the text of a lambda
    stands outside the loop that calls it.
    """
    for file in dict.fromkeys(where.file for where in step.locations()):
        lines = [where.line for where in step.locations() if where.file == file]
        around = [
            x
            for x in loops
            if x.file == file and any(x.line <= line <= x.last_line for line in lines)
        ]
        if around:
            return min(around, key=lambda x: x.last_line - x.line)
    return None


def work_of(step: Instruction | PtxInstruction) -> str:
    """The SASS name of the work a step does, or an empty text."""
    if isinstance(step, Instruction):
        return step.root if step.root in _WORK else ""
    for prefix, name in _PTX_WORK.items():
        if step.opcode == prefix or step.opcode.startswith(prefix + "."):
            return name
    return ""


def is_service(steps: Steps, loop: Loop) -> bool:
    """Loops that nobody wrote as one: a barrier wait, or ptxas's loop over lanes around TMA."""
    if steps[loop.last].opcode.startswith("BRA.U.ANY"):
        return True
    waits = any("PHASECHK" in steps[i].opcode or "try_wait" in steps[i].opcode for i in loop.body)
    return waits and not any(work_of(steps[i]) for i in loop.body)


def unrolling(
    assembly: Assembly, wanted: SourceLoop, loops: Sequence[SourceLoop], kind: str
) -> Unrolling:
    """What became of one source loop in "ptx" or "sass"."""
    listing: PtxKernel | SassKernel = assembly.ptx if kind == "ptx" else assembly.sass
    machine = assembly.ptx_loops if kind == "ptx" else assembly.sass_loops
    steps = listing.instructions
    owners = {x: owner(steps[x.last], loops) for x in machine if not is_service(steps, x)}
    mine = [x for x, by in owners.items() if by == wanted]
    if not mine:
        return Unrolling("", (), None)
    # Loops that are left in the listing; the others count as part of the loop around them.
    live = [x for x in loops if x in owners.values()]
    work = [w if (w := work_of(s)) and owner(s, live) == wanted else "" for s in steps]
    total = Counter(work[i] for x in mine for i in x.body)
    counted = next((w for w in _WORK if total[w]), "")
    counts = [bool(counted) and w == counted for w in work]
    pieces = [Piece(True, x.first, x.last, sum(counts[i] for i in x.body), x) for x in mine]
    if counted:
        service = frozenset[int]().union(*(x.body for x in machine if x not in owners))
        pieces += _straight(steps, counts, mine, service)
        pieces = [p for p in pieces if p.work]
    pieces.sort(key=lambda p: p.first)
    return Unrolling(counted, tuple(pieces), _factor(steps, wanted, pieces))


def _straight(
    steps: Steps, counts: Sequence[bool], mine: Sequence[Loop], service: frozenset[int]
) -> list[Piece]:
    """Runs without a branch, outside the loop's machine loops, that do some of its work once.

    Branches of service loops do not end a run.
    """
    taken = frozenset[int]().union(*(x.body for x in mine))
    pieces: list[Piece] = []
    run: list[int] = []
    for index in range(len(steps) + 1):
        branches = index < len(steps) and steps[index].target and index not in service
        if index == len(steps) or index in taken or branches:
            if run:
                pieces.append(Piece(False, run[0], run[-1], len(run)))
            run = []
        elif counts[index]:
            run.append(index)
    return pieces


def _factor(steps: Steps, wanted: SourceLoop, pieces: Sequence[Piece]) -> int | None:
    works = [p.work for p in pieces if p.work]
    if len(set(works)) > 1 and max(works) % min(works) == 0:
        return max(works) // min(works)
    steps_by = [counter_step(steps, p.loop) for p in pieces if p.loop]
    widest = max((abs(s) for s in steps_by if s is not None), default=0)
    if wanted.increment and widest and widest % wanted.increment == 0:
        return widest // wanted.increment
    return None


_IMMEDIATE = re.compile(r"^-?(0x[0-9a-f]+|\d+)$")


def counter_step(steps: Steps, loop: Loop) -> int | None:
    """By how much the counter that decides a loop moves in one trip; None if not found.

    Follows the branch's predicate to the comparison, and its register to an add of a constant.
    """
    guard = steps[loop.last].guard.lstrip("!")
    body = sorted(loop.body)
    compared: set[str] = set()
    for index in body:
        names = [n.strip().removesuffix(".reuse") for n in steps[index].operands.split(",")]
        if steps[index].root in ("ISETP", "UISETP", "setp") and names[0] == guard:
            compared = set(names[1:])
    for index in body:
        step = steps[index]
        names = [n.strip().removesuffix(".reuse") for n in step.operands.split(",")]
        if step.root in ("IADD3", "VIADD", "UIADD3", "add") and names[0] in compared:
            values = [_signed(n) for n in names[2:] if _IMMEDIATE.match(n)]
            if values and names[1] == names[0] and _writes(steps, body, names[0]) == 1:
                return values[0]
    return None


def _writes(steps: Steps, body: Sequence[int], register: str) -> int:
    """How often a loop body writes a register: a counter is written once, by its own step."""
    count = 0
    for index in body:
        step = steps[index]
        if isinstance(step, Instruction):
            count += register in written(step)
        else:
            count += step.operands.split(",")[0].strip() == register
    return count


def _signed(text: str) -> int:
    value = int(text, 0)
    return value - 2**32 if value >= 2**31 else value
