"""Owns control flow in machine code: loops, reachable code, and zeros that are written twice.

Plain algorithms on lists of indices; no knowledge of what instructions mean beyond branch, exit and
(for zeros) destination.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.inspect.sass import SassKernel, Step

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
        last, body = found.get(first, (index, {first}))
        found[first] = max(last, index), body | reachable(before, start=index, without=first)
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
    # A label may stand behind the last instruction.
    target = [] if step.target is None or step.target >= count else [step.target]
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


def reachable(
    graph: Sequence[Sequence[int]], *, start: int = 0, without: int | None = None
) -> set[int]:
    """Indices that can be reached from `start`, never passing `without`."""
    seen: set[int] = set()
    todo = [start] if graph else []
    while todo:
        index = todo.pop()
        if index not in seen and index != without:
            seen.add(index)
            todo += graph[index]
    return seen


_DESTINATION = re.compile(r"(?:U?P[T\d], )?(U?R)(\d+)\b")  # a predicate may come first
_ZERO_MOVES = ("MOV", "UMOV", "IMAD.MOV.U32", "IMAD.MOV", "HFMA2.MMA", "HFMA2", "CS2R", "CS2R.32")
# How many registers an opcode writes, where not one; errs on the side of more.
_WIDE = {r"\.128|^LDSM|^[HI]MMA": 4, r"\.64|\.WIDE|\.F64|^CS2R$|^D(ADD|FMA|MUL)": 2}


def written(step: Step) -> set[str]:
    """Registers that an instruction may overwrite ("R10", "UR4")."""
    found = _DESTINATION.match(step.operands)
    if found is None:
        return set()
    count = next((n for part, n in _WIDE.items() if re.search(part, step.opcode)), 1)
    if shape := re.match(r"[HQI]GMMA\.64x(\d+)x", step.opcode):
        count = int(shape[1]) // 2
    return {f"{found[1]}{int(found[2]) + i}" for i in range(count)}


def _zeroed(step: Step) -> set[str]:
    zero = all(name.lstrip("-") in ("RZ", "URZ", "0", "0x0", "SRZ") for name in step.names[1:])
    return written(step) if zero and step.opcode in _ZERO_MOVES else set()


def redundant_zeros(kernel: SassKernel) -> list[int]:
    """Indices of zero writes to registers that hold zero already on every path there."""
    after, steps = edges(kernel), kernel.instructions
    zeroed = [_zeroed(step) for step in steps]
    dirtied = [written(step) - zero for step, zero in zip(steps, zeroed, strict=True)]
    # Zero before each instruction: at first all that is ever zeroed, then less along each way.
    held = [set[str]().union(*zeroed) for _ in steps]
    todo = list(reachable(after))
    live = sorted(todo)
    held[:1] = [set()]
    while todo:
        index = todo.pop()
        # Under a guard only some threads write: it is zero if it was before.
        sure = set() if steps[index].guard else zeroed[index]
        left = held[index] - dirtied[index] | sure
        for following in after[index]:
            if not held[following] <= left:
                held[following] &= left
                todo.append(following)
    return [index for index in live if zeroed[index] and zeroed[index] <= held[index]]
