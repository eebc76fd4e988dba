"""Owns the remarks about loops: unrolling, tails, hoisted loads, and what one trip consists of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.flow import Loop
from octavo.inspect.listing import Step
from octavo.inspect.opcodes import GROUP_ORDER, MATH, TENSOR, group_of
from octavo.inspect.source_loops import (
    SourceLoop,
    Unrolling,
    is_service,
    source_loops,
    unrolling,
)

_ARITHMETIC = ("FFMA", "HMMA", "HGMMA", "QGMMA")
_LOADS = ("LDG", "LDS")
_MULTIPLY = ("FFMA", "HMMA")


def loop_notes(assembly: Assembly) -> Iterator[Note]:
    """Remarks on each source loop that is left as a loop, then one on those that are gone."""
    written = source_loops(assembly)
    gone: list[SourceLoop] = []
    seen: set[Loop] = set()
    for loop in written:
        found = unrolling(assembly, loop, written)
        if not found.pieces:
            gone.append(loop)
            continue
        yield _unroll_note(assembly, loop, found)
        yield from _tail_notes(assembly, loop, found)
        machine = found.main.loop if found.main else None
        if machine and machine not in seen and found.counted in _ARITHMETIC:
            seen.add(machine)
            yield from _hoist_notes(assembly, loop, machine)
            yield from _mix_notes(assembly, machine)
    if gone:
        text = (
            f"Loops that are gone, fully unrolled by the compiler because their trip count is a constant:"
            f" {_listed([_place(assembly, loop) for loop in gone])}."
        )
        yield Note("Loops gone", text, tuple(n for x in gone for n in _lines(assembly, x)))


def _place(assembly: Assembly, loop: SourceLoop) -> str:
    """ "line 20", or with the file when the loop stands in a header."""
    file = "" if loop.file == assembly.main else loop.file.rsplit("/", 1)[-1] + " "
    return f"{file}line {loop.line}"


def _lines(assembly: Assembly, loop: SourceLoop) -> tuple[int, ...]:
    return (loop.line,) if loop.file == assembly.main else ()


def _unroll_note(assembly: Assembly, loop: SourceLoop, found: Unrolling) -> Note:
    match (found.ptx_factor, found.factor):
        case (_, None):
            said = "stays a loop, with no sign of unrolling."
        case (None, b):
            said = f"is unrolled x{b} in SASS."
        case (1, 1):
            said = "is not unrolled: one trip is one iteration."
        case (a, b) if a == b:
            said = f"is unrolled x{a} already in PTX, and stays so in SASS."
        case (1, b):
            said = f"is not unrolled in PTX and unrolled x{b} in SASS, by ptxas."
        case (a, b):
            said = f"is unrolled x{a} in PTX by the front end and x{b} in SASS:"
            said += " ptxas unrolled once more on top."
    text = f"`{loop.text}` ({_place(assembly, loop)}) {said}"
    main = found.main
    if main is None:
        return Note("Unrolling", text, _lines(assembly, loop))
    if main.work:
        text += f" One trip of the main loop does {main.work} {found.counted}."
    offsets = tuple(step.at for step in main.ends)
    return Note("Unrolling", text, _lines(assembly, loop), found.ptx_lines, offsets)


def _tail_notes(assembly: Assembly, loop: SourceLoop, found: Unrolling) -> Iterator[Note]:
    """The pieces that do what is left over when the trip count is no multiple of the factor."""
    if not found.tails or not found.main:
        return
    unit = min(piece.work for piece in found.pieces)
    alike: dict[tuple[str, int], list[str]] = {}
    for piece in found.tails:
        kind = "loop" if piece.loop else "straight run"
        key = kind, piece.work // unit
        alike.setdefault(key, []).append(f"{piece.ends[0].at:#06x}")
    said = []
    for (kind, work), starts in alike.items():
        count = f"{len(starts)} {kind}s" if len(starts) > 1 else f"a {kind}"
        said.append(f"{count} of {work} (at {', '.join(starts)})")
    text = (
        f"The loop of {_place(assembly, loop)} has tails, because the compiler does not know that the"
        f" trip count is a multiple of the unroll factor: besides the main loop of"
        f" {found.main.work // unit} iterations a trip there are {_listed(said)}."
    )
    offsets = tuple(piece.ends[0].at for piece in found.tails)
    yield Note("Tail loops", text, _lines(assembly, loop), offsets=offsets)


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _hoist_notes(assembly: Assembly, loop: SourceLoop, machine: Loop) -> Iterator[Note]:
    """Loads that stand before the first multiply-add of a trip, in SASS against PTX."""
    body = [assembly.sass.instructions[index] for index in sorted(machine.body)]
    first = next((n for n, step in enumerate(body) if step.root in _MULTIPLY), 0)
    loads = [step for step in body if step.root in _LOADS]
    early = [step for step in body[:first] if step.root in _LOADS]
    # The same in the order of the PTX that the trip was made of.
    ptx = {step.ptx_line or 0: step.root for step in body if step.root in (*_LOADS, *_MULTIPLY)}
    line = min((line for line, root in ptx.items() if root in _MULTIPLY), default=0)
    early_ptx = sum(other < line for other in ptx)
    if len(early) > max(early_ptx, 1):
        text = (
            f"ptxas hoisted loads: {len(early)} of the {len(loads)} loads of one trip are issued"
            f" before its first {body[first].root} (in PTX {early_ptx}), and up to"
            f" {most_in_flight(body)} are in flight at once. So a warp waits for memory a few times"
            f" a trip, not at every multiply-add."
        )
        offsets = tuple(step.at for step in early)
        yield Note("Loads hoisted", text, _lines(assembly, loop), offsets=offsets)


def most_in_flight(body: list[Step]) -> int:
    """The most loads that are issued and not yet used, going through `body` in order."""
    waiting: set[str] = set()
    most = 0
    for step in body:
        is_load = step.root in _LOADS
        waiting -= set(step.names[is_load:])
        waiting |= set(step.names[:is_load])
        most = max(most, len(waiting))
    return most


def _mix_notes(assembly: Assembly, machine: Loop) -> Iterator[Note]:
    """What one trip is made of, for loops that do arithmetic."""
    steps = assembly.sass.instructions
    inner = [x for x in assembly.sass_loops if x.body < machine.body]
    # A sum over loops that turn a different number of times says nothing.
    if len(machine.body) < 8 or not all(is_service(assembly.sass, x) for x in inner):
        return
    body = [steps[index] for index in sorted(machine.body)]
    ends = body[0], steps[machine.last]
    groups = Counter(map(group_of, body))
    parts = ", ".join(f"{groups[g]} {g}" for g in GROUP_ORDER if groups[g])
    where = f"{ends[0].at:#06x}-{ends[1].at:#06x}"
    text = f"One trip of the loop at {where} is {len(body)} instructions: {parts}."
    if groups[MATH] and not groups[TENSOR]:
        text += (
            f" An SM sub-partition issues one instruction a clock, so at most"
            f" {groups[MATH] / len(body):.0%} of its fp32 rate is left for this loop."
        )
    if clocks := sum(map(tensor_clocks, body)):
        text += (
            f" Its wgmma keep the SM's tensor cores busy for {clocks:.0f} clocks; meanwhile each"
            f" sub-partition can issue one instruction a clock, so the rest need not cost time."
        )
    yield assembly.note("Instruction mix", text, ends)


def tensor_clocks(step: Step) -> float:
    """Clocks for which a wgmma occupies all tensor cores of an SM; 0 for any other instruction.

    A 16-bit m64nNk16 is 64 * N * 16 multiply-adds at 2048 a clock; 8-bit types run at twice that.
    """
    found = re.match(r"([HQI])GMMA\.(\d+)x(\d+)x(\d+)", step.opcode)
    if not found:
        return 0.0
    m, n, k = map(int, found.groups()[1:])
    return m * n * k / (2048 if found.group(1) == "H" else 4096)
