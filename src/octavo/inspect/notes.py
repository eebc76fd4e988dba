"""Owns the remarks on one kernel, most useful first. Their words are in remarks.txt."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.flow import Loop, edges, reachable, redundant_zeros
from octavo.inspect.sass import GROUP_ORDER, MATH, TENSOR, Step
from octavo.inspect.source_loops import SourceLoop, Unrolling, is_service, source_loops, unrolling

_WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
_SYNC = (
    *("BAR", "SYNCS.EXCH", "SYNCS.ARRIVE", "SYNCS.PHASECHK", "UCGABAR_WAIT"),
    *("FENCE.VIEW.ASYNC", "MEMBAR"),
)
_ADDRESS = re.compile(r"\[(U?R\d+)(?:\.64)?(?:\+UR\d+)?(?:\+(-?0x[0-9a-f]+))?\]")
_ARITHMETIC = ("FFMA", "HMMA", "HGMMA", "QGMMA")
_LOADS = ("LDG", "LDS")
_MULTIPLY = ("FFMA", "HMMA")


def notes(assembly: Assembly) -> list[Note]:
    """All remarks, grouped by topic in a fixed order."""
    return [
        *_compiler_notes(assembly),
        *_loop_notes(assembly),
        *_math_notes(assembly),
        *_memory_notes(assembly),
        *_async_notes(assembly),
        *_odd_notes(assembly),
    ]


def access_bytes(opcode: str) -> int:
    """Bytes one thread moves with a plain load or store opcode."""
    return next((size for part, size in _WIDTHS.items() if part in opcode), 4)


def _compiler_notes(assembly: Assembly) -> Iterator[Note]:
    """What ptxas warned of; registers, spills, stack, and how warpgroups trade registers."""
    note, sass = assembly.note, assembly.sass
    for code, count in sorted(Counter(re.findall(r"\(C(75\d\d)\)", assembly.log)).items()):
        yield note("Compiler warning", "warning", code=code, count=count)
    local = sass.count("LDL") + sass.count("STL")
    yield note("Registers", "registers", found=assembly.resources, local=local)
    for step in sass.instructions:
        if step.root == "USETMAXREG":
            count = int(step.names[-1], 0)
            yield note("Registers", "setmaxnreg", [step], step=step, count=count)


def _math_notes(assembly: Assembly) -> Iterator[Note]:
    """FFMA and tensor-core counts and shapes."""
    note, steps = assembly.note, assembly.sass.instructions
    if ffma := assembly.sass.count("FFMA"):
        inside = sum(s.root == "FFMA" for s in assembly.looped)
        yield note("Arithmetic", "ffma", count=ffma, inside=inside)
    for opcode, count in assembly.sass.opcodes().items():
        if found := re.match(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)", opcode):
            shape = tuple(map(int, found.groups()))
            clears = sum(s.opcode == opcode and "!UPT" in s.operands for s in steps)
            facts: dict[str, Any] = {"count": count, "opcode": opcode}
            yield note("Tensor core", "wgmma", **facts, shape=shape, clears=clears)
    waits = Counter(int(s.names[-1], 16) for s in steps if s.starts("WARPGROUP.DEPBAR"))
    for left, count in waits.items():
        yield note("Tensor core", "wgmma_wait", left=left, count=count)


def _memory_notes(assembly: Assembly) -> Iterator[Note]:
    """Widths of plain loads and stores, the matrix forms, and loads that could have been wider."""
    note, sass = assembly.note, assembly.sass
    for root in ("LDG", "STG", "LDS", "STS"):
        if widths := Counter(access_bytes(s.opcode) for s in sass.instructions if s.root == root):
            yield note("Memory width", "width", root=root, widths=widths)
    for root in ("LDSM", "STSM", "LDGSTS"):
        if count := sass.count(root):
            yield note("Memory width", "matrix_memory", root=root, count=count)
    most = max(
        (_neighbours(assembly, loop.body) for loop in assembly.sass_loops), key=len, default=[]
    )
    if len(most) >= 4:
        yield note("Not vectorised", "neighbours", most, count=len(most))


def _neighbours(assembly: Assembly, body: frozenset[int]) -> list[Step]:
    """The most narrow loads of a loop at consecutive addresses, which wide loads could replace."""
    rows: dict[str, dict[int, Step]] = {}
    for step in (assembly.sass.instructions[index] for index in sorted(body)):
        found = _ADDRESS.findall(step.operands)
        if step.root == "LDG" and access_bytes(step.opcode) == 4 and found:
            register, offset = found[-1]  # the first bracket may be the descriptor
            rows.setdefault(register, {})[int(offset or "0", 16)] = step
    beside = ([row[o] for o in sorted(row) if {o + 4, o - 4} & row.keys()] for row in rows.values())
    return max(beside, key=len, default=[])


def _async_notes(assembly: Assembly) -> Iterator[Note]:
    """TMA, and whether ptxas wrapped it in a loop over lanes; barriers, waits, fences, dear fences."""
    note, sass = assembly.note, assembly.sass
    if loads := [s for s in sass.instructions if s.root == "UTMALDG"]:
        multicast = sum("MULTICAST" in s.opcode for s in loads)
        yield note("TMA", "tma_loads", count=len(loads), multicast=multicast)
    if stores := sass.count("UTMASTG"):
        yield note("TMA", "tma_stores", count=stores, fences=sass.count("FENCE.VIEW.ASYNC"))
    ends = [sass.instructions[loop.last] for loop in assembly.sass_loops]
    if wrapped := [s for s in ends if s.starts("BRA.U.ANY")]:
        yield note("TMA", "tma_wrapped", wrapped, count=len(wrapped))
    if counts := {opcode: n for opcode in _SYNC if (n := sass.count(opcode))}:
        short = [loop.body for loop in assembly.sass_loops if len(loop.body) <= 12]
        waits = sum(any("PHASECHK" in sass.instructions[i].opcode for i in b) for b in short)
        yield note("Barriers", "sync", counts=counts, waits=waits)
    fences = [s for s in sass.instructions if s.starts("MEMBAR") and ".GPU" in s.opcode]
    if hot := [s for s in fences if s in assembly.looped]:
        yield note("Dear fence", "dear_fence", hot, count=len(hot))


def _odd_notes(assembly: Assembly) -> Iterator[Note]:
    """Zeros written to registers that hold zero, predicates, and code that is never reached."""
    note, steps = assembly.note, assembly.sass.instructions
    if again := [steps[i] for i in redundant_zeros(assembly.sass)]:
        names = sorted({s.names[0] for s in again}, key=lambda n: (len(n), n))
        inside = sum(s in assembly.looped for s in again)
        facts: dict[str, Any] = {"count": len(again), "names": names, "inside": inside}
        yield note("Redundant zero-init", "zeros", again, **facts)
    if exits := [s for s in steps if s.root == "EXIT" and s.guard]:
        yield note("Predicates", "predicated_exit", exits, step=exits[0])
    if guarded := sum(bool(s.guard) and s.root not in ("EXIT", "BRA") for s in steps):
        yield note("Predicates", "predicated", count=guarded, share=guarded / len(steps))
    live = reachable(edges(assembly.sass))
    dead = [(i, s) for i, s in enumerate(steps) if i not in live]
    padding = sum(s.root == "NOP" for _, s in dead)
    if trap := [s for i, s in dead if s.target == i]:
        last = trap[-1:]
        yield note("Trailing self-branch", "self_branch", last, step=last[0], padding=padding)
    if rest := [s for i, s in dead if s.target != i and s.root != "NOP"]:
        yield note("Dead code", "dead", rest, count=len(rest))


def _loop_notes(assembly: Assembly) -> Iterator[Note]:
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
        yield from _unroll_notes(assembly, loop, found)
        if main.loop and main.loop not in seen and found.counted in _ARITHMETIC:
            seen.add(main.loop)
            yield from _hoist_notes(assembly, loop, main.loop)
            yield from _mix_notes(assembly, main.loop)
    if gone:
        places, lines = zip(*(_place(assembly, loop) for loop in gone), strict=True)
        yield assembly.note("Loops gone", "gone", lines=sum(lines, ()), places=places)


def _place(assembly: Assembly, loop: SourceLoop) -> tuple[str, tuple[int, ...]]:
    """ "line 20" and (20,); in a header its name comes before, and no line of the main file is meant."""
    if loop.file == assembly.main:
        return f"line {loop.line}", (loop.line,)
    return f"{loop.file.rsplit('/', 1)[-1]} line {loop.line}", ()


def _unroll_notes(assembly: Assembly, loop: SourceLoop, found: Unrolling) -> Iterator[Note]:
    """The factors, and the pieces for trip counts that are no multiple of them."""
    assert found.main is not None
    place, lines = _place(assembly, loop)
    facts: dict[str, Any] = {"place": place, "lines": lines, "main": found.main}
    about: dict[str, Any] = {"text": loop.text, "found": found, "ptx_lines": found.ptx_lines}
    yield assembly.note("Unrolling", "unrolled", found.main.ends, **facts, **about)
    if found.tails:
        unit = min(piece.work for piece in found.tails)
        alike: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        for piece in found.tails:
            kind = "loop" if piece.loop else "straight run"
            alike[kind, piece.work // unit].append(f"{piece.ends[0].at:#06x}")
        at = [piece.ends[0] for piece in found.tails]
        yield assembly.note("Tail loops", "tails", at, **facts, unit=unit, alike=alike)


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
        loads = sum(step.root in _LOADS for step in body)
        facts: dict[str, Any] = {"early": len(early), "early_ptx": early_ptx, "loads": loads}
        facts |= {"first": body[first].root, "most": most_in_flight(body)}
        yield assembly.note(
            "Loads hoisted", "hoisted", early, **facts, lines=_place(assembly, loop)[1]
        )


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
    body = steps[machine.first : machine.last + 1]  # without slow paths of waits, moved out of line
    ends = body[0], body[-1]
    groups = Counter(step.group for step in body)
    facts: dict[str, Any] = {"ends": (ends[0].at, ends[1].at), "count": len(body)}
    facts |= {"parts": ", ".join(f"{groups[g]} {g}" for g in GROUP_ORDER if groups[g])}
    facts |= {"math": 0 if groups[TENSOR] else groups[MATH] / len(body)}
    facts |= {"clocks": sum(map(tensor_clocks, body))}
    yield assembly.note("Instruction mix", "mix", ends, **facts)


def tensor_clocks(step: Step) -> float:
    """Clocks for which a wgmma occupies all tensor cores of an SM; 0 for any other instruction.

    A 16-bit m64nNk16 is 64 * N * 16 multiply-adds at 2048 a clock; 8-bit types run at twice that.
    """
    found = re.match(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)", step.opcode)
    work = math.prod(map(int, found.groups())) if found else 0
    return work / (2048 if step.opcode[0] == "H" else 4096)
