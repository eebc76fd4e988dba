"""Owns the remarks on one kernel: what the compiler did, in words, most useful first.

Those about loops are in `notes_loops`. Here: loads and stores, tensor cores, barriers, registers, and
what a careful reader finds odd: repeated zeros, predicates, unreachable code, the self-branch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.flow import edges, reachable, redundant_zeros
from octavo.inspect.listing import Step
from octavo.inspect.notes_loops import loop_notes

_WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
_MEMORY = {
    "LDG": ("load", "from global memory"),
    "STG": ("store", "to global memory"),
    "LDS": ("load", "from shared memory"),
    "STS": ("store", "to shared memory"),
}
_MATRIX_MEMORY = {
    "LDSM": "ldmatrix: one instruction loads up to four 8x8 matrices for a warp",
    "STSM": "stmatrix: one instruction stores up to four 8x8 matrices of a warp",
    "LDGSTS": "cp.async: global to shared memory without passing through registers",
}
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
_SERIAL = (
    "wgmma instructions are SERIALIZED, each waits for the one before; the accumulators are touched"
    " while wgmma still runs, or there are too few registers"
)
# What ptxas warns of about wgmma (its messages C75xx), in our words.
_WGMMA_WARNINGS = dict.fromkeys(("7510", "7511", "7514", "7515"), _SERIAL) | {
    "7517": "it put in a wait for wgmma, because its registers are read too early",
    "7519": "it put in a fence (warpgroup.arrive), because registers are written before wgmma",
}


def notes(assembly: Assembly) -> list[Note]:
    """All remarks, grouped by topic in a fixed order."""
    return [
        *_warning_notes(assembly),
        *_register_notes(assembly),
        *loop_notes(assembly),
        *_math_notes(assembly),
        *_memory_notes(assembly),
        *_neighbour_notes(assembly),
        *_tma_notes(assembly),
        *_sync_notes(assembly),
        *_zero_notes(assembly),
        *_predicate_notes(assembly),
        *_dead_notes(assembly),
    ]


def many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def access_bytes(opcode: str) -> int:
    """Bytes one thread moves with a plain load or store opcode."""
    return next((size for part, size in _WIDTHS.items() if part in opcode), 4)


def _warning_notes(assembly: Assembly) -> Iterator[Note]:
    for code, count in sorted(Counter(re.findall(r"\(C(75\d\d)\)", assembly.log)).items()):
        meaning = _WGMMA_WARNINGS.get(code, "see the compile log")
        text = f"ptxas said C{code} {'once' if count == 1 else f'{count} times'}: {meaning}."
        yield assembly.note("Compiler warning", text)


def _register_notes(assembly: Assembly) -> Iterator[Note]:
    """Registers, spills, stack, shared memory, and how warpgroups trade registers."""
    found = assembly.resources
    local = assembly.sass.count("LDL") + assembly.sass.count("STL")
    said = "no spills, no stack, no local memory"
    if found.spill_stores or found.spill_loads or found.stack or local:
        said = (
            f"it SPILLS: {found.spill_stores} bytes stored and {found.spill_loads} loaded,"
            f" {found.stack} bytes of stack, {local} local-memory instructions"
        )
    memory = f"{found.static_smem} bytes of static shared memory"
    yield assembly.note("Registers", f"{found.registers} registers a thread, {memory}; {said}.")
    for step in assembly.sass.instructions:
        if step.root == "USETMAXREG":
            verb = "gives registers back, down to" if "DEALLOC" in step.opcode else "takes up to"
            text = f"this warpgroup {verb} {int(step.names[-1], 0)} a thread."
            yield assembly.note("Registers", f"USETMAXREG at {step.at:#06x}: {text}", [step])


def _memory_notes(assembly: Assembly) -> Iterator[Note]:
    """Widths of plain loads and stores, one remark for each kind, and of the matrix forms."""
    for root, (noun, end) in _MEMORY.items():
        found = [access_bytes(s.opcode) for s in assembly.sass.instructions if s.root == root]
        if found:
            widths = sorted(Counter(found).items(), reverse=True)
            said = ", ".join(f"{n} of {width} bytes" for width, n in widths)
            text = f"{many(len(found), noun)} {end} ({root}): {said} a thread."
            if max(found) < 16:
                text += " None uses the widest form, 16 bytes (.128)."
            yield assembly.note("Memory width", text)
    for root, words in _MATRIX_MEMORY.items():
        if count := assembly.sass.count(root):
            yield assembly.note("Memory width", f"{count} {root}, {words}.")


def _neighbour_notes(assembly: Assembly) -> Iterator[Note]:
    """Narrow loads at consecutive addresses, which one wide load could replace."""
    best: list[Step] = []
    for loop in assembly.sass_loops:
        rows: dict[str, dict[int, Step]] = {}
        for step in (assembly.sass.instructions[index] for index in sorted(loop.body)):
            found = _ADDRESS.findall(step.operands)
            if step.root == "LDG" and access_bytes(step.opcode) == 4 and found:
                register, offset = found[-1]  # the first bracket may be the descriptor
                rows.setdefault(register, {})[int(offset or "0", 16)] = step
        for row in rows.values():
            best = max(best, [row[o] for o in sorted(row) if {o + 4, o - 4} & row.keys()], key=len)
    if len(best) >= 4:
        text = (
            f"{len(best)} loads of one thread read consecutive 4-byte words through one pointer (only"
            f" the constant in the address differs). Four of them would fit one LDG.128, but the"
            f" compiler may not assume that the pointer is a multiple of 16."
        )
        yield assembly.note("Not vectorised", text, best)


def _math_notes(assembly: Assembly) -> Iterator[Note]:
    """FFMA and tensor-core counts and shapes."""
    steps = assembly.sass.instructions
    if ffma := assembly.sass.count("FFMA"):
        inside = sum(s.root == "FFMA" for s in assembly.looped)
        text = f"{ffma} FFMA (fp32 multiply-add), {inside} of them inside loops."
        yield assembly.note("Arithmetic", text)
    for opcode, count in assembly.sass.opcodes().items():
        if found := re.match(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)", opcode):
            m, n, k = map(int, found.groups())
            text = (
                f"{count} {opcode}: a warpgroup multiplies a {m}x{k} tile by a {k}x{n} tile, both in"
                f" shared memory, into {m * n // 128} fp32 registers a thread."
            )
            if clears := sum(s.opcode == opcode and "!UPT" in s.operands for s in steps):
                text += (
                    f" In {clears} the result replaces the registers, so nothing is zeroed before."
                )
            yield assembly.note("Tensor core", text)
    waits = Counter(int(s.names[-1], 16) for s in steps if s.starts("WARPGROUP.DEPBAR"))
    for left, count in waits.items():
        rest = f"all but {many(left, 'group')}" if left else "all of it"
        text = f"{many(count, 'wait')} for wgmma (WARPGROUP.DEPBAR) until {rest} is done."
        yield assembly.note("Tensor core", text)


def _tma_notes(assembly: Assembly) -> Iterator[Note]:
    """TMA loads, multicast, stores, and whether ptxas wrapped them in a loop over lanes."""
    steps = assembly.sass.instructions
    if loads := assembly.sass.count("UTMALDG"):
        text = f"{many(loads, 'TMA load')} (UTMALDG): each moves one tile for the whole CTA."
        if multicast := sum(s.root == "UTMALDG" and "MULTICAST" in s.opcode for s in steps):
            text += (
                f" {multicast} are MULTICAST: one read of L2 fills the shared memory of several"
                f" CTAs of the cluster."
            )
        yield assembly.note("TMA", text)
    if stores := assembly.sass.count("UTMASTG"):
        fences = many(assembly.sass.count("FENCE.VIEW.ASYNC"), "proxy fence")
        yield assembly.note("TMA", f"{many(stores, 'TMA store')} (UTMASTG); {fences} in all.")
    ends = [steps[loop.last] for loop in assembly.sass_loops]
    if wrapped := [s for s in ends if s.starts("BRA.U.ANY")]:
        text = (
            f"{many(len(wrapped), 'TMA instruction')} in a small loop over the lanes of the warp"
            f" (BRA.U.ANY): ptxas could not see that only one thread gets there, and takes turns in"
            f" case several did. elect.sync in a warp-uniform branch avoids it."
        )
        yield assembly.note("TMA", text, wrapped)


def _sync_notes(assembly: Assembly) -> Iterator[Note]:
    """Barriers, waits, fences, and fences that are dearer than they look in the source."""
    sass = assembly.sass
    parts = [many(n, words) for prefix, words in _SYNC.items() if (n := sass.count(prefix))]
    if parts:
        text = f"Synchronisation: {', '.join(parts)}."
        short = [loop.body for loop in assembly.sass_loops if len(loop.body) <= 12]
        if waits := sum(any("PHASECHK" in sass.instructions[i].opcode for i in b) for b in short):
            text += f" {many(waits, 'short loop')} only to wait for an mbarrier."
        yield assembly.note("Barriers", text)
    fences = [s for s in sass.instructions if s.starts("MEMBAR") and ".GPU" in s.opcode]
    if hot := [s for s in fences if s in assembly.looped]:
        text = (
            f"{many(len(hot), 'GPU-wide memory fence')} (MEMBAR..GPU) inside loops. A release or"
            f" acquire at cluster scope becomes one; if the thread has nothing of its own to"
            f" publish, the unqualified form of the instruction does without."
        )
        yield assembly.note("Dear fence", text, hot)


def _zero_notes(assembly: Assembly) -> Iterator[Note]:
    """Registers set to zero that hold zero."""
    if again := [assembly.sass.instructions[i] for i in redundant_zeros(assembly.sass)]:
        names = sorted({s.names[0] for s in again}, key=lambda n: (len(n), n))
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        inside = sum(s in assembly.looped for s in again)
        where = f"{inside} of them inside loops" if inside else "Outside loops it costs nothing"
        text = (
            f"{many(len(again), 'redundant zero-initialisation')} ({shown}): the register holds zero"
            f" already, whichever way control came. Usually the front end wrote the start value once"
            f" for each way into a loop and its tails, and ptxas kept them all. {where}."
        )
        yield assembly.note("Redundant zero-init", text, again)


def _predicate_notes(assembly: Assembly) -> Iterator[Note]:
    steps = assembly.sass.instructions
    if exits := [s for s in steps if s.root == "EXIT" and s.guard]:
        text = (
            f"`@{exits[0].guard} EXIT` at {exits[0].at:#06x}: the condition became a predicate,"
            f" and threads that fail it end right there; no branch is needed."
        )
        yield assembly.note("Predicates", text, exits)
    if guarded := sum(bool(s.guard) and s.root not in ("EXIT", "BRA") for s in steps):
        text = (
            f"{many(guarded, 'instruction')} ({guarded / len(steps):.0%}) predicated with @P: issued"
            f" for the whole warp, but with an effect only where the predicate holds, in place of a"
            f" branch."
        )
        yield assembly.note("Predicates", text)


def _dead_notes(assembly: Assembly) -> Iterator[Note]:
    live = reachable(edges(assembly.sass))
    dead = [(i, s) for i, s in enumerate(assembly.sass.instructions) if i not in live]
    padding = sum(s.root == "NOP" for _, s in dead)
    if trap := [s for i, s in dead if s.target == i]:
        text = (
            f"The last instruction, at {trap[-1].at:#06x}, branches to itself: it is never reached"
            f" and stops anything that would run past the end; {padding} NOPs after it fill the last"
            f" 128 bytes of code."
        )
        yield assembly.note("Trailing self-branch", text, trap[-1:])
    if rest := [s for i, s in dead if s.target != i and s.root != "NOP"]:
        text = f"{many(len(rest), 'instruction')} that control can never reach."
        yield assembly.note("Dead code", text, rest)
