"""Owns the remarks on one kernel: what the compiler did, most useful first. The words are in remarks.txt.

Those about loops are in `notes_loops`. Here: loads and stores, tensor cores, barriers, registers, and
what a careful reader finds odd: repeated zeros, predicates, unreachable code, the self-branch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.flow import edges, reachable, redundant_zeros
from octavo.inspect.listing import Step
from octavo.inspect.notes_loops import loop_notes

_WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
_SYNC = {
    "BAR": "CTA barrier",
    "SYNCS.EXCH": "mbarrier initialisation",
    "SYNCS.ARRIVE": "mbarrier arrival",
    "SYNCS.PHASECHK": "mbarrier wait",
    "UCGABAR_WAIT": "cluster barrier",
    "FENCE.VIEW.ASYNC": "proxy fence",
    "MEMBAR": "memory fence",
}
_ADDRESS = re.compile(r"\[(U?R\d+)(?:\.64)?(?:\+UR\d+)?(?:\+(-?0x[0-9a-f]+))?\]")


def notes(assembly: Assembly) -> list[Note]:
    """All remarks, grouped by topic in a fixed order."""
    return [
        *_compiler_notes(assembly),
        *loop_notes(assembly),
        *_math_notes(assembly),
        *_memory_notes(assembly),
        *_tma_notes(assembly),
        *_sync_notes(assembly),
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


def _tma_notes(assembly: Assembly) -> Iterator[Note]:
    """TMA loads, multicast, stores, and whether ptxas wrapped them in a loop over lanes."""
    note, sass = assembly.note, assembly.sass
    if loads := [s for s in sass.instructions if s.root == "UTMALDG"]:
        multicast = sum("MULTICAST" in s.opcode for s in loads)
        yield note("TMA", "tma_loads", count=len(loads), multicast=multicast)
    if stores := sass.count("UTMASTG"):
        yield note("TMA", "tma_stores", count=stores, fences=sass.count("FENCE.VIEW.ASYNC"))
    ends = [sass.instructions[loop.last] for loop in assembly.sass_loops]
    if wrapped := [s for s in ends if s.starts("BRA.U.ANY")]:
        yield note("TMA", "tma_wrapped", wrapped, count=len(wrapped))


def _sync_notes(assembly: Assembly) -> Iterator[Note]:
    """Barriers, waits, fences, and fences that are dearer than they look in the source."""
    note, sass = assembly.note, assembly.sass
    if counts := [(words, n) for prefix, words in _SYNC.items() if (n := sass.count(prefix))]:
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
