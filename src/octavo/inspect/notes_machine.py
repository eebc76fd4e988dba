"""Owns the remarks about everything but loops: loads and stores, tensor cores, barriers, registers,
and what a careful reader finds odd: repeated zeros, predicates, unreachable code, the self-branch.
"""

from __future__ import annotations

import re
from collections import Counter

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.flow import edges, reachable, redundant_zeros
from octavo.inspect.notes_loops import lane_loops, wait_loops
from octavo.inspect.sass import Instruction

_WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
_MEMORY = {
    "LDG": ("load", "from global memory"),
    "STG": ("store", "to global memory"),
    "LDS": ("load", "from shared memory"),
    "STS": ("store", "to shared memory"),
}
_ADDRESS = re.compile(r"\[(U?R\d+)(?:\.64)?(?:\+UR\d+)?(?:\+(-?0x[0-9a-f]+))?\]")


_SERIAL = (
    "wgmma instructions are SERIALIZED, each waits for the one before; the accumulators are touched"
    " while wgmma still runs, or there are too few registers"
)
_WGMMA_WARNINGS = {
    "7510": _SERIAL,
    "7511": _SERIAL,
    "7514": _SERIAL,
    "7515": _SERIAL,
    "7517": "it put in a wait for wgmma, because its registers are read too early",
    "7519": "it put in a fence (warpgroup.arrive), because registers are written before wgmma",
}


def many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def access_bytes(opcode: str) -> int:
    """Bytes one thread moves with a plain load or store opcode."""
    return next((size for part, size in _WIDTHS.items() if part in opcode), 4)


def memory_notes(assembly: Assembly) -> list[Note]:
    """Widths of plain loads and stores, one remark for each kind, and of the matrix forms."""
    notes: list[Note] = []
    for root, (noun, end) in _MEMORY.items():
        steps = [s for s in assembly.sass.instructions if s.root == root]
        if not steps:
            continue
        widths = Counter(access_bytes(s.opcode) for s in steps)
        said = ", ".join(f"{n} of {w} bytes" for w, n in sorted(widths.items(), reverse=True))
        text = f"{many(len(steps), noun)} {end} ({root}): {said} a thread."
        if max(widths) < 16:
            text += " None uses the widest form, 16 bytes (.128)."
        notes.append(Note("Memory width", text, (), (), (), {"opcode": root, **_keys(widths)}))
    notes += _neighbour_notes(assembly)
    for root, words in (
        ("LDSM", "ldmatrix: one instruction loads up to four 8x8 matrices for a warp"),
        ("STSM", "stmatrix: one instruction stores up to four 8x8 matrices of a warp"),
        ("LDGSTS", "cp.async: global to shared memory without passing through registers"),
    ):
        count = assembly.sass.count(root)
        if count:
            notes.append(Note("Memory width", f"{count} {root}, {words}.", facts={root: count}))
    return notes


def _keys(widths: Counter[int]) -> dict[str, int]:
    return {f"bytes{width}": count for width, count in widths.items()}


def _neighbour_notes(assembly: Assembly) -> list[Note]:
    """Narrow loads at consecutive addresses, which one wide load could replace."""
    best: list[Instruction] = []
    steps = assembly.sass.instructions
    for loop in assembly.sass_loops:
        rows: dict[str, dict[int, Instruction]] = {}
        for index in sorted(loop.body):
            step = steps[index]
            found = _ADDRESS.findall(step.operands)
            if step.root == "LDG" and access_bytes(step.opcode) == 4 and found:
                register, offset = found[-1]  # the first bracket may be the descriptor
                rows.setdefault(register, {})[int(offset or "0", 16)] = step
        for row in rows.values():
            run = [row[o] for o in sorted(row) if o + 4 in row or o - 4 in row]
            best = max(best, run, key=len)
    if len(best) < 4:
        return []
    text = (
        f"{len(best)} loads of one thread read consecutive 4-byte words through one pointer (only"
        f" the constant in the address differs). Four of them would fit one LDG.128, but the"
        f" compiler may not assume that the pointer is a multiple of 16."
    )
    return [
        Note("Not vectorised", text, (), (), tuple(s.offset for s in best), {"loads": len(best)})
    ]


def math_notes(assembly: Assembly) -> list[Note]:
    """FFMA and tensor-core counts and shapes."""
    notes: list[Note] = []
    steps = assembly.sass.instructions
    ffma = assembly.sass.count("FFMA")
    if ffma:
        inside = sum(s.root == "FFMA" for i, s in enumerate(steps) if _in_loop(assembly, i))
        text = f"{ffma} FFMA (fp32 multiply-add), {inside} of them inside loops."
        notes.append(Note("Arithmetic", text, facts={"FFMA": ffma, "in_loops": inside}))
    shapes = Counter(s.opcode for s in steps if re.match(r"[HQI]GMMA", s.opcode))
    for opcode, count in shapes.items():
        found = re.search(r"\.(\d+)x(\d+)x(\d+)", opcode)
        if not found:
            continue
        m, n, k = map(int, found.groups())
        clears = sum(s.opcode == opcode and "!UPT" in s.operands for s in steps)
        text = (
            f"{count} {opcode}: a warpgroup multiplies a {m}x{k} tile by a {k}x{n} tile, both in"
            f" shared memory, into {m * n // 128} fp32 registers a thread."
        )
        if clears:
            text += f" In {clears} the result replaces the registers, so nothing is zeroed before."
        facts = {"opcode": opcode, "count": count, "m": m, "n": n, "k": k, "clears": clears}
        notes.append(Note("Tensor core", text, facts=facts))
    waits = Counter(
        s.operands.replace(" ", "") for s in steps if s.opcode.startswith("WARPGROUP.DEPBAR")
    )
    for operands, count in waits.items():
        left = int(operands.rsplit(",", 1)[-1], 16)
        rest = "all of it is done" if left == 0 else f"all but {many(left, 'group')} is done"
        text = f"{many(count, 'wait')} for wgmma (WARPGROUP.DEPBAR) until {rest}."
        notes.append(Note("Tensor core", text, facts={"waits": count, "left": left}))
    return notes


def _in_loop(assembly: Assembly, index: int) -> bool:
    return any(index in loop for loop in assembly.sass_loops)


def tma_notes(assembly: Assembly) -> list[Note]:
    """TMA loads, multicast, stores, and whether ptxas wrapped them in a loop over lanes."""
    steps = assembly.sass.instructions
    notes: list[Note] = []
    loads = [s for s in steps if s.root == "UTMALDG"]
    multicast = sum("MULTICAST" in s.opcode for s in loads)
    if loads:
        text = f"{many(len(loads), 'TMA load')} (UTMALDG): each moves one tile for the whole CTA."
        if multicast:
            text += (
                f" {multicast} are MULTICAST: one read of L2 fills the shared memory of several"
                f" CTAs of the cluster."
            )
        notes.append(Note("TMA", text, facts={"loads": len(loads), "multicast": multicast}))
    stores = [s for s in steps if s.root == "UTMASTG"]
    if stores:
        fenced = assembly.sass.count("FENCE.VIEW.ASYNC")
        text = f"{many(len(stores), 'TMA store')} (UTMASTG); {many(fenced, 'proxy fence')} in all."
        notes.append(Note("TMA", text, facts={"stores": len(stores), "fences": fenced}))
    wrapped = lane_loops(assembly)
    if wrapped:
        text = (
            f"{many(len(wrapped), 'TMA instruction')} in a small loop over the lanes of the warp"
            f" (BRA.U.ANY): ptxas could not see that only one thread gets there, and takes turns in"
            f" case several did. elect.sync in a warp-uniform branch avoids it."
        )
        offsets = tuple(steps[x.last].offset for x in wrapped)
        notes.append(Note("TMA", text, offsets=offsets, facts={"lane_loops": len(wrapped)}))
    return notes


def sync_notes(assembly: Assembly) -> list[Note]:
    """Barriers, waits, fences, and fences that are dearer than they look in the source."""
    sass = assembly.sass
    parts = []
    for prefix, words in (
        ("BAR", "CTA barrier"),
        ("SYNCS.EXCH", "mbarrier initialisation"),
        ("SYNCS.ARRIVE", "mbarrier arrival"),
        ("SYNCS.PHASECHK", "mbarrier wait"),
        ("UCGABAR_WAIT", "cluster barrier"),
        ("FENCE.VIEW.ASYNC", "proxy fence"),
        ("MEMBAR", "memory fence"),
    ):
        count = sass.count(prefix)
        if count:
            parts.append(many(count, words))
    notes = []
    if parts:
        counts = {p: sass.count(p) for p in ("BAR", "SYNCS", "FENCE", "MEMBAR", "UCGABAR_WAIT")}
        text = "Synchronisation: " + ", ".join(parts) + "."
        waits = wait_loops(assembly)
        if waits:
            text += f" {many(len(waits), 'short loop')} only to wait for an mbarrier."
        notes.append(Note("Barriers", text, facts=counts))
    hot = [
        s
        for i, s in enumerate(sass.instructions)
        if s.opcode.startswith("MEMBAR") and ".GPU" in s.opcode and _in_loop(assembly, i)
    ]
    if hot:
        lines = sorted({line for s in hot if (line := assembly.home_line(s))})
        text = (
            f"{many(len(hot), 'GPU-wide memory fence')} (MEMBAR..GPU) inside loops. A release or"
            f" acquire at cluster scope becomes one; if the thread has nothing of its own to"
            f" publish, the unqualified form of the instruction does without."
        )
        offsets = tuple(s.offset for s in hot)
        facts = {"in_loops": len(hot)}
        notes.append(Note("Dear fence", text, tuple(lines), (), offsets, facts))
    return notes


def register_notes(assembly: Assembly) -> list[Note]:
    """Registers, spills, stack, shared memory, and how warpgroups trade registers."""
    found = assembly.resources
    text = (
        f"{found.registers} registers a thread, {found.static_smem} bytes of static shared memory"
    )
    local = assembly.sass.count("LDL") + assembly.sass.count("STL")
    facts = {
        "registers": found.registers,
        "spills": found.spill_stores + found.spill_loads,
        "stack": found.stack,
        "local": local,
    }
    if facts["spills"] or local or found.stack:
        text += (
            f"; it SPILLS: {found.spill_stores} bytes stored and {found.spill_loads} loaded,"
            f" {found.stack} bytes of stack, {local} local-memory instructions."
        )
    else:
        text += "; no spills, no stack, no local memory."
    notes = [Note("Registers", text, facts=facts)]
    for step in assembly.sass.instructions:
        if step.root in ("USETMAXREG", "SETMAXREG"):
            count = int(step.operands.rsplit(",", 1)[-1].strip(), 0)
            verb = "gives registers back, down to" if "DEALLOC" in step.opcode else "takes up to"
            said = f"USETMAXREG at {step.offset:#06x}: this warpgroup {verb} {count} a thread."
            notes.append(Note("Registers", said, offsets=(step.offset,), facts={"to": count}))
    return notes


def warning_notes(assembly: Assembly) -> list[Note]:
    """What ptxas warned of about wgmma (its messages C75xx), in our words."""
    counts = Counter(code for code in re.findall(r"\(C(75\d\d)\)", assembly.log))
    notes = []
    for code, count in sorted(counts.items()):
        meaning = _WGMMA_WARNINGS.get(code, "see the compile log")
        text = f"ptxas said C{code} {'once' if count == 1 else f'{count} times'}: {meaning}."
        notes.append(Note("Compiler warning", text, facts={"code": code, "count": count}))
    return notes


def oddity_notes(assembly: Assembly) -> list[Note]:
    """What a careful reader stops at."""
    return [*_zero_notes(assembly), *_predicate_notes(assembly), *_dead_notes(assembly)]


def _zero_notes(assembly: Assembly) -> list[Note]:
    steps = assembly.sass.instructions
    again = [steps[i] for i in redundant_zeros(assembly.sass)]
    if not again:
        return []
    names = sorted({s.operands.split(",")[0] for s in again}, key=lambda n: (len(n), n))
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    text = (
        f"{many(len(again), 'redundant zero-initialisation')} ({shown}): the register holds zero"
        f" already, whichever way control came. Usually the front end wrote the start value once for"
        f" each way into a loop and its tails, and ptxas kept them all."
    )
    inside = sum(_in_loop(assembly, assembly.sass.instructions.index(s)) for s in again)
    text += f" {inside} of them inside loops." if inside else " Outside loops it costs nothing."
    lines = sorted({line for s in again if (line := assembly.home_line(s))})
    offsets = tuple(s.offset for s in again)
    return [Note("Redundant zero-init", text, tuple(lines), (), offsets, {"count": len(again)})]


def _predicate_notes(assembly: Assembly) -> list[Note]:
    steps = assembly.sass.instructions
    notes = []
    exits = [s for s in steps if s.root == "EXIT" and s.guard]
    if exits:
        lines = sorted({line for s in exits if (line := assembly.home_line(s))})
        text = (
            f"`@{exits[0].guard} EXIT` at {exits[0].offset:#06x}: the condition became a predicate,"
            f" and threads that fail it end right there; no branch is needed."
        )
        offsets = tuple(s.offset for s in exits)
        notes.append(Note("Predicates", text, tuple(lines), (), offsets, {"exits": len(exits)}))
    guarded = [s for s in steps if s.guard and s.root not in ("EXIT", "BRA")]
    if guarded:
        share = len(guarded) / len(steps)
        text = (
            f"{many(len(guarded), 'instruction')} ({share:.0%}) predicated with @P: issued for the"
            f" whole warp, but with an effect only where the predicate holds, in place of a branch."
        )
        notes.append(Note("Predicates", text, facts={"guarded": len(guarded)}))
    return notes


def _dead_notes(assembly: Assembly) -> list[Note]:
    steps = assembly.sass.instructions
    live = reachable(edges(assembly.sass))
    dead = [s for i, s in enumerate(steps) if i not in live]
    trap = [s for s in dead if s.target and assembly.sass.labels.get(s.target) == s.offset]
    padding = [s for s in dead if s.root == "NOP"]
    rest = [s for s in dead if s not in trap and s not in padding]
    notes = []
    if trap:
        text = (
            f"The last instruction, at {trap[-1].offset:#06x}, branches to itself: it is never"
            f" reached and stops anything that would run past the end; {len(padding)} NOPs after it"
            f" fill the last 128 bytes of code."
        )
        facts = {"count": len(trap), "nops": len(padding)}
        notes.append(Note("Trailing self-branch", text, (), (), (trap[-1].offset,), facts))
    if rest:
        text = f"{many(len(rest), 'instruction')} that control can never reach."
        offsets = tuple(s.offset for s in rest)
        notes.append(Note("Dead code", text, (), (), offsets, {"count": len(rest)}))
    unused = unused_in_ptx(assembly)
    if unused:
        text = (
            f"{many(len(unused), 'PTX result')} never read; ptxas drops them, so PTX is not the"
            f" place to count instructions."
        )
        notes.append(Note("Dead code", text, (), tuple(unused), (), {"unused_ptx": len(unused)}))
    return notes


def unused_in_ptx(assembly: Assembly) -> list[int]:
    """PTX lines whose only result is a register that nothing reads."""
    steps = assembly.ptx.instructions
    uses: Counter[str] = Counter()
    for step in steps:
        uses.update(set(re.findall(r"%\w+", step.operands + step.guard)))
    plain = ("mov", "add", "sub", "mul", "mad", "cvt", "cvta", "shl", "and", "or", "ld")
    return [
        s.line
        for s in steps
        if s.root in plain
        and (first := re.match(r"%\w+", s.operands))
        and uses[first.group()] == 1
        and len(re.findall(re.escape(first.group()) + r"\b", s.operands)) == 1
    ]
