"""Owns the remarks about loops: unrolling, tails, hoisted loads, and what one trip consists of."""

from __future__ import annotations

import re
from collections import Counter

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.flow import Loop
from octavo.inspect.opcodes import GROUP_ORDER, MATH, TENSOR
from octavo.inspect.ptx import PtxInstruction
from octavo.inspect.sass import Instruction
from octavo.inspect.source_loops import (
    Piece,
    SourceLoop,
    Steps,
    Unrolling,
    is_service,
    source_loops,
    unrolling,
    work_of,
)

_ARITHMETIC = ("FFMA", "HMMA", "HGMMA", "QGMMA")


def loop_notes(assembly: Assembly) -> list[Note]:
    """Remarks on each source loop that is left as a loop, then one on those that are gone."""
    written = source_loops(assembly)
    notes: list[Note] = []
    gone: list[tuple[SourceLoop, str]] = []
    seen: set[Piece] = set()
    for loop in written:
        ptx = unrolling(assembly, loop, written, "ptx")
        sass = unrolling(assembly, loop, written, "sass")
        if not sass.pieces:
            gone.append((loop, "ptxas" if ptx.pieces else "the front end"))
            continue
        notes.append(_unroll_note(assembly, loop, ptx, sass))
        notes += _tail_notes(assembly, loop, ptx, sass)
        main = sass.main
        if main and main.loop and main not in seen and sass.counted in _ARITHMETIC:
            seen.add(main)
            notes += _hoist_notes(assembly, loop, ptx, main.loop)
            notes += _mix_notes(assembly, main.loop)
    return notes + _gone_notes(assembly, gone)


def place(assembly: Assembly, loop: SourceLoop) -> str:
    """ "line 20", or with the file when the loop stands in a header."""
    if loop.file == assembly.main:
        return f"line {loop.line}"
    return f"{loop.file.rsplit('/', 1)[-1]} line {loop.line}"


def _lines(assembly: Assembly, loop: SourceLoop) -> tuple[int, ...]:
    return (loop.line,) if loop.file == assembly.main else ()


def _unroll_note(assembly: Assembly, loop: SourceLoop, ptx: Unrolling, sass: Unrolling) -> Note:
    facts = {"line": loop.line, "ptx": ptx.factor, "sass": sass.factor}
    where = f"`{loop.text}` ({place(assembly, loop)})"
    match (ptx.factor, sass.factor):
        case (None, None):
            text = f"{where} stays a loop, with no sign of unrolling."
        case (1, 1):
            text = f"{where} is not unrolled: one trip is one iteration."
        case (a, b) if a == b:
            text = f"{where} is unrolled x{a} already in PTX, and stays so in SASS."
        case (int(a), int(b)) if a > 1:
            text = (
                f"{where} is unrolled x{a} in PTX by the front end and x{b} in SASS:"
                f" ptxas unrolled once more on top."
            )
        case (a, int(b)):
            before = "not unrolled" if a == 1 else "a loop"
            text = f"{where} is {before} in PTX and unrolled x{b} in SASS, by ptxas."
        case (a, _):
            text = f"{where} is unrolled x{a} in PTX; SASS does not tell."
    counted = sass.counted or ptx.counted
    if counted and sass.main and sass.main.work:
        text += f" One trip of the main loop does {sass.main.work} {counted}."
    return Note(
        "Unrolling",
        text,
        _lines(assembly, loop),
        _ptx_lines(assembly, ptx.main),
        _offsets(assembly, sass.main),
        facts,
    )


def _ptx_lines(assembly: Assembly, piece: Piece | None) -> tuple[int, ...]:
    steps = assembly.ptx.instructions
    return (steps[piece.first].line, steps[piece.last].line) if piece else ()


def _offsets(assembly: Assembly, piece: Piece | None) -> tuple[int, ...]:
    steps = assembly.sass.instructions
    return (steps[piece.first].offset, steps[piece.last].offset) if piece else ()


def _tail_notes(
    assembly: Assembly, loop: SourceLoop, ptx: Unrolling, sass: Unrolling
) -> list[Note]:
    """The pieces that do what is left over when the trip count is no multiple of the factor."""
    tails = sass.tails
    if not tails or not sass.main:
        return []
    unit = min(p.work for p in sass.pieces)
    alike: dict[tuple[bool, int], list[str]] = {}
    for piece in tails:
        start = assembly.sass.instructions[piece.first].offset
        alike.setdefault((piece.is_loop, piece.work // unit), []).append(f"{start:#06x}")
    said = []
    for (is_loop, size), starts in alike.items():
        kind = "loop" if is_loop else "straight run"
        many = f"{len(starts)} {kind}s" if len(starts) > 1 else f"a {kind}"
        said.append(f"{many} of {size} (at {', '.join(starts)})")
    text = (
        f"The loop of {place(assembly, loop)} has tails, because the compiler does not know that the"
        f" trip count is a multiple of the unroll factor: besides the main loop of"
        f" {sass.main.work // unit} iterations a trip there are {_listed(said)}. In PTX there"
        f" {'is' if len(ptx.tails) == 1 else 'are'} {len(ptx.tails)}."
    )
    works = [p.work // unit for p in tails]
    facts = {"line": loop.line, "main": sass.main.work // unit, "tails": works}
    offsets = tuple(assembly.sass.instructions[p.first].offset for p in tails)
    return [Note("Tail loops", text, _lines(assembly, loop), (), offsets, facts)]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _hoist_notes(assembly: Assembly, loop: SourceLoop, ptx: Unrolling, machine: Loop) -> list[Note]:
    """Loads that stand before the first multiply-add of a trip, in SASS against PTX."""
    steps = assembly.sass.instructions
    body = [steps[i] for i in sorted(machine.body)]
    loads = [s for s in body if s.root in ("LDG", "LDS")]
    first = next((n for n, s in enumerate(body) if work_of(s) in ("FFMA", "HMMA")), None)
    if not loads or first is None:
        return []
    early = sum(s.root in ("LDG", "LDS") for s in body[:first])
    flight = most_in_flight(body)
    early_ptx = _early_in_ptx(assembly.ptx.instructions, ptx)
    if early <= max(early_ptx, 1):
        return []
    text = (
        f"ptxas hoisted loads: {early} of the {len(loads)} loads of one trip are issued before its"
        f" first {work_of(body[first])} (in PTX {early_ptx}), and up to {flight} are in flight at"
        f" once. So a warp waits for memory a few times a trip, not at every multiply-add."
    )
    facts = {"early": early, "loads": len(loads), "early_ptx": early_ptx, "in_flight": flight}
    offsets = tuple(s.offset for s in body[:first] if s.root in ("LDG", "LDS"))
    return [Note("Loads hoisted", text, _lines(assembly, loop), (), offsets, facts)]


def _early_in_ptx(steps: Steps, ptx: Unrolling) -> int:
    early = 0
    main = ptx.main
    for index in sorted(main.loop.body) if main and main.loop else []:
        work = work_of(steps[index])
        if work == "FFMA":
            break
        early += work in ("LDG", "LDS")
    return early


def most_in_flight(body: list[Instruction]) -> int:
    """The most loads that are issued and not yet used, going through `body` in order."""
    waiting: set[str] = set()
    most = 0
    for step in body:
        names = [n.strip().removesuffix(".reuse") for n in step.operands.split(",")]
        waiting -= set(names[1:] if step.root in ("LDG", "LDS") else names)
        if step.root in ("LDG", "LDS"):
            waiting.add(names[0])
            most = max(most, len(waiting))
    return most


def _mix_notes(assembly: Assembly, machine: Loop) -> list[Note]:
    """What one trip is made of, for loops that do arithmetic."""
    steps = assembly.sass.instructions
    inner = [x for x in assembly.sass_loops if x.body < machine.body]
    if not all(is_service(steps, x) for x in inner):
        return []  # a sum over loops that turn a different number of times says nothing
    body = [steps[i] for i in sorted(machine.body)]
    groups = Counter(s.group for s in body)
    useful = groups[MATH] + groups[TENSOR]
    if not useful or len(body) < 8:
        return []
    parts = [f"{groups[g]} {g}" for g in GROUP_ORDER if groups[g]]
    start, end = body[0].offset, steps[machine.last].offset
    text = f"One trip of the loop at {start:#06x}-{end:#06x} is {len(body)} instructions: "
    text += ", ".join(parts) + "."
    if groups[MATH] and not groups[TENSOR]:
        share = groups[MATH] / len(body)
        text += (
            f" An SM sub-partition issues one instruction a clock, so at most {share:.0%} of its"
            f" fp32 rate is left for this loop."
        )
    clocks = sum(map(tensor_clocks, body))
    if clocks:
        text += (
            f" Its wgmma keep the SM's tensor cores busy for {clocks:.0f} clocks; meanwhile each"
            f" sub-partition can issue one instruction a clock, so the rest need not cost time."
        )
    facts = {"instructions": len(body), "clocks": clocks, **{g: groups[g] for g in groups}}
    return [Note("Instruction mix", text, (), (), (start, end), facts)]


def tensor_clocks(step: Instruction) -> float:
    """Clocks for which a wgmma occupies all tensor cores of an SM; 0 for any other instruction.

    A 16-bit m64nNk16 is 64 * N * 16 multiply-adds at 2048 a clock; 8-bit types run at twice that.
    """
    found = re.match(r"([HQI])GMMA\.(\d+)x(\d+)x(\d+)", step.opcode)
    if not found:
        return 0.0
    m, n, k = map(int, found.groups()[1:])
    return m * n * k / (2048 if found.group(1) == "H" else 4096)


def _gone_notes(assembly: Assembly, gone: list[tuple[SourceLoop, str]]) -> list[Note]:
    notes = []
    for who in ("the front end", "ptxas"):
        mine = [loop for loop, by in gone if by == who]
        if mine:
            text = (
                f"Loops that are gone, fully unrolled by {who} because their trip count is a"
                f" constant: {_listed([place(assembly, loop) for loop in mine])}."
            )
            lines = tuple(x.line for x in mine if x.file == assembly.main)
            facts = {"lines": lines, "by": who}
            notes.append(Note("Loops gone", text, lines, (), (), facts))
    return notes


def wait_loops(assembly: Assembly) -> list[Loop]:
    """SASS loops that only wait for an mbarrier."""
    steps = assembly.sass.instructions
    return [
        x
        for x in assembly.sass_loops
        if any("PHASECHK" in steps[i].opcode for i in x.body) and len(x.body) <= 12
    ]


def lane_loops(assembly: Assembly) -> list[Loop]:
    """SASS loops that ptxas put around a TMA instruction, one turn a distinct operand."""
    steps = assembly.sass.instructions
    return [x for x in assembly.sass_loops if steps[x.last].opcode.startswith("BRA.U.ANY")]


def line_of(step: Instruction | PtxInstruction) -> int | None:
    return step.where.line if step.where else None
