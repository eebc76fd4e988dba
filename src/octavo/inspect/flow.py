"""Owns control flow in machine code: loops, reachable code, and which registers surely hold zero.

Plain algorithms on lists of indices; no knowledge of what instructions mean beyond branch, exit and
(for zeros) destination.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.inspect.listing import Step
from octavo.inspect.opcodes import INTEGER, LOAD, MATH, MOVE, group_of
from octavo.inspect.sass import SassKernel

_BRANCHES = ("BRA", "UBRA", "JMP")


@dataclass(frozen=True)
class Loop:
    """A natural loop: entered at index `first` only, left or repeated at the branch `last`.

    `body` holds all its indices; code that the compiler moved out of line may lie past `last`.
    Depth 0 is outermost.
    """

    first: int
    last: int
    body: frozenset[int]
    depth: int = 0


def loops(kernel: SassKernel) -> list[Loop]:
    """All natural loops by start; a branch to itself is none. Branches to one start share a loop.

    A backward branch alone is no loop: ptxas moves the slow path of a barrier wait to the end of
    the kernel, and that jumps back too. The target must dominate the branch.
    """
    after = edges(kernel)
    before: list[list[int]] = [[] for _ in after]
    for index, following in enumerate(after):
        for other in following:
            before[other].append(index)
    found: dict[int, tuple[int, set[int]]] = {}
    for index, step in enumerate(kernel.instructions):
        first = step.target
        if first is None or first >= index or step.root not in _BRANCHES:
            continue
        if index in reachable(after, without=first):
            continue
        last, body = found.setdefault(first, (index, {first}))
        todo = [index]
        while todo:
            if (node := todo.pop()) not in body:
                body.add(node)
                todo += before[node]
        found[first] = max(last, index), body
    bodies = [body for _, body in found.values()]
    return [
        Loop(first, last, frozenset(body), sum(body < other for other in bodies))
        for first, (last, body) in sorted(found.items())
    ]


def edges(kernel: SassKernel) -> list[list[int]]:
    """The control-flow graph: for each index, those that may run next."""
    steps = kernel.instructions
    return [_successors(step, index, len(steps)) for index, step in enumerate(steps)]


def _successors(step: Step, index: int, count: int) -> list[int]:
    following = [index + 1] if index + 1 < count else []
    target = [] if step.target is None else [step.target]
    if step.root in ("EXIT", "RET"):
        return following if step.guard else []
    if step.root == "CALL":
        return following + target
    if step.root in _BRANCHES:
        # A guard, or (BRA.U !UP0, `(label)) a predicate among the operands.
        words = (".DIV", ".ANY")
        conditional = step.guard or "," in step.operands or any(w in step.opcode for w in words)
        return target + (following if conditional else [])
    if step.root in ("BRX", "JMX"):
        # An indirect branch may go anywhere: give up on precision, not on safety.
        return list(range(count))
    return following


def reachable(after: Sequence[Sequence[int]], without: int | None = None) -> set[int]:
    """Indices that can be reached from the first instruction, never passing `without`."""
    seen: set[int] = set()
    todo = [0] if after else []
    while todo:
        index = todo.pop()
        if index not in seen and index != without:
            seen.add(index)
            todo += after[index]
    return seen


_REGISTER = re.compile(r"(U?R)(\d+)")
_ZERO_MOVES = ("MOV", "UMOV", "IMAD.MOV.U32", "IMAD.MOV", "HFMA2.MMA", "HFMA2")
_WIDE_ROOTS = {"LDSM": 4, "HMMA": 4, "IMMA": 4, "CS2R": 2}
# Opcodes of these groups have one 32-bit result unless a suffix says more; others may have two.
_NARROW_GROUPS = (MATH, LOAD, INTEGER, MOVE)
_NO_DESTINATION = {"STG", "STS", "STL", "ST", "RED", "BAR", "BRA", "EXIT", "UTMALDG", "UTMASTG"}


def zero_writes(step: Step) -> list[str]:
    """Registers that this instruction sets to zero ("R10", "UR4"); empty for any other."""
    zero = all(name.lstrip("-") in ("RZ", "URZ", "0", "0x0", "SRZ") for name in step.names[1:])
    if zero and len(step.names) > 1 and (step.opcode in _ZERO_MOVES or step.root == "CS2R"):
        return _span(step.names[0], 2 if step.opcode == "CS2R" else 1)
    return []


def written(step: Step) -> list[str]:
    """Registers an instruction may overwrite; errs on the side of more."""
    if step.root in _NO_DESTINATION:
        return []
    # A predicate destination may come first.
    return next((found for name in step.names[:2] if (found := _span(name, _width(step)))), [])


def _width(step: Step) -> int:
    if shape := re.match(r"[A-Z]GMMA\.64x(\d+)x", step.opcode):
        return int(shape.group(1)) // 2
    if ".128" in step.opcode:
        return 4
    if any(part in step.opcode for part in (".64", ".WIDE", ".F64")):
        return 2
    return _WIDE_ROOTS.get(step.root, 1 if group_of(step) in _NARROW_GROUPS else 2)


def _span(name: str, count: int) -> list[str]:
    found = _REGISTER.match(name)
    return [f"{found[1]}{int(found[2]) + i}" for i in range(count)] if found else []


def redundant_zeros(kernel: SassKernel) -> list[int]:
    """Indices of zero writes to registers that hold zero already on every path there.

    A must-analysis: the registers known to be zero before each instruction, met over all paths,
    until nothing changes. Sets are bit masks because kernels have thousands of instructions.
    """
    steps, graph = kernel.instructions, edges(kernel)
    bits: dict[str, int] = {}

    def mask(names: Sequence[str]) -> int:
        return sum(1 << bits.setdefault(name, len(bits)) for name in names)

    zeroed = [mask(zero_writes(step)) for step in steps]
    killed = [mask(written(step)) for step in steps]
    known: dict[int, int] = {0: 0}  # of the instructions reached so far
    todo = [0] if steps else []
    while todo:
        index = heapq.heappop(todo)
        before = known[index]
        after = before | zeroed[index] if zeroed[index] else before & ~killed[index]
        if steps[index].guard and zeroed[index] & ~before:
            after &= ~zeroed[index]  # written by some threads only
        for following in graph[index]:
            new = known.get(following, after) & after
            if new != known.get(following):
                known[following] = new
                heapq.heappush(todo, following)
    return [i for i, zeros in enumerate(zeroed) if zeros and i in known and not zeros & ~known[i]]
