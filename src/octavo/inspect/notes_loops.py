"""Owns the remarks about loops: unrolling, tails, hoisted loads, and what one trip consists of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.flow import Loop
from octavo.inspect.listing import Step
from octavo.inspect.opcodes import GROUP_ORDER, MATH, TENSOR, group_of
from octavo.inspect.source_loops import (
    Piece,
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
    seen: set[Loop | None] = set()
    for loop in written:
        found = unrolling(assembly, loop, written)
        main = found.main
        if main is None:
            gone.append(loop)
            continue
        yield from _unroll_notes(assembly, loop, found, main)
        if main.loop and main.loop not in seen and found.counted in _ARITHMETIC:
            seen.add(main.loop)
            yield from _hoist_notes(assembly, loop, main.loop)
            yield from _mix_notes(assembly, main.loop)
    if gone:
        lines = tuple(line for loop in gone for line in _lines(assembly, loop))
        places = [_place(assembly, loop) for loop in gone]
        yield assembly.note("Loops gone", "gone", lines=lines, places=places)


def _place(assembly: Assembly, loop: SourceLoop) -> str:
    """ "line 20", or with the file when the loop stands in a header."""
    file = "" if loop.file == assembly.main else loop.file.rsplit("/", 1)[-1] + " "
    return f"{file}line {loop.line}"


def _lines(assembly: Assembly, loop: SourceLoop) -> tuple[int, ...]:
    return (loop.line,) if loop.file == assembly.main else ()


def _unroll_notes(
    assembly: Assembly, loop: SourceLoop, found: Unrolling, main: Piece
) -> Iterator[Note]:
    """The factors, and the pieces for trip counts that are no multiple of them."""
    place, lines = _place(assembly, loop), _lines(assembly, loop)
    facts: dict[str, Any] = {"text": loop.text, "place": place, "lines": lines}
    facts |= {"ptx": found.ptx_factor, "sass": found.factor, "ptx_lines": found.ptx_lines}
    facts |= {"work": main.work, "counted": found.counted}
    yield assembly.note("Unrolling", "unrolled", main.ends, **facts)
    if not found.tails:
        return
    unit = min(piece.work for piece in found.tails)
    alike: dict[tuple[str, int], list[str]] = {}
    for piece in found.tails:
        key = "loop" if piece.loop else "straight run", piece.work // unit
        alike.setdefault(key, []).append(f"{piece.ends[0].at:#06x}")
    pieces = []
    for (kind, work), starts in alike.items():
        count = f"{len(starts)} {kind}s" if len(starts) > 1 else f"a {kind}"
        pieces.append(f"{count} of {work} (at {', '.join(starts)})")
    at = [piece.ends[0] for piece in found.tails]
    facts = {"lines": lines, "place": place, "main": main.work // unit, "pieces": pieces}
    yield assembly.note("Tail loops", "tails", at, **facts)


def _hoist_notes(assembly: Assembly, loop: SourceLoop, machine: Loop) -> Iterator[Note]:
    """Loads that stand before the first multiply-add of a trip, in SASS against PTX."""
    body = [assembly.sass.instructions[index] for index in sorted(machine.body)]
    first = next((n for n, step in enumerate(body) if step.root in _MULTIPLY), 0)
    early = [step for step in body[:first] if step.root in _LOADS]
    # The same in the order of the PTX that the trip was made of.
    ptx = {step.ptx_line or 0: step.root for step in body if step.root in (*_LOADS, *_MULTIPLY)}
    line = min((line for line, root in ptx.items() if root in _MULTIPLY), default=0)
    early_ptx = sum(other < line for other in ptx)
    if len(early) > max(early_ptx, 1):
        facts: dict[str, Any] = {"first": body[first].root, "early": len(early)}
        facts |= {"early_ptx": early_ptx, "loads": sum(step.root in _LOADS for step in body)}
        facts |= {"most": most_in_flight(body), "lines": _lines(assembly, loop)}
        yield assembly.note("Loads hoisted", "hoisted", early, **facts)


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
    facts: dict[str, Any] = {"ends": (ends[0].at, ends[1].at), "count": len(body)}
    facts |= {"parts": ", ".join(f"{groups[g]} {g}" for g in GROUP_ORDER if groups[g])}
    facts |= {"math": 0 if groups[TENSOR] else groups[MATH] / len(body)}
    facts |= {"clocks": sum(map(tensor_clocks, body))}
    yield assembly.note("Instruction mix", "mix", ends, **facts)


def tensor_clocks(step: Step) -> float:
    """Clocks for which a wgmma occupies all tensor cores of an SM; 0 for any other instruction.

    A 16-bit m64nNk16 is 64 * N * 16 multiply-adds at 2048 a clock; 8-bit types run at twice that.
    """
    found = re.match(r"([HQI])GMMA\.(\d+)x(\d+)x(\d+)", step.opcode)
    if not found:
        return 0.0
    m, n, k = map(int, found.groups()[1:])
    return m * n * k / (2048 if found.group(1) == "H" else 4096)
