"""Owns control flow over a listing: loops, reachable code, and which registers surely hold zero.

Works on any listing with branch targets, so PTX and SASS share it. Plain algorithms on lists of
indices; no knowledge of what instructions mean beyond branch, exit and (for zeros) destination.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.inspect.opcodes import INTEGER, LOAD, MATH, MOVE
from octavo.inspect.sass import Instruction, SassKernel


class Listing(Protocol):
    """What PtxKernel and SassKernel have in common."""

    @property
    def instructions(self) -> Sequence[Step]: ...

    def index_of(self, label: str) -> int | None: ...


class Step(Protocol):
    @property
    def guard(self) -> str: ...

    @property
    def opcode(self) -> str: ...

    @property
    def target(self) -> str | None: ...

    @property
    def root(self) -> str: ...


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

    def __contains__(self, index: int) -> bool:
        return index in self.body


def loops(listing: Listing) -> list[Loop]:
    """All natural loops by start; a branch to itself is none. Branches to one start share a loop.

    A backward branch alone is no loop: ptxas moves the slow path of a barrier wait to the end of
    the kernel, and that jumps back too. The target must dominate the branch.
    """
    after = edges(listing)
    before: list[list[int]] = [[] for _ in after]
    for index, following in enumerate(after):
        for other in following:
            before[other].append(index)
    found: dict[int, tuple[int, set[int]]] = {}
    outside: dict[int, set[int]] = {}
    for index, step in enumerate(listing.instructions):
        target = listing.index_of(step.target) if step.target and is_branch(step) else None
        if target is None or target >= index:
            continue
        if target not in outside:
            outside[target] = reachable(after, without=target)
        if index in outside[target]:
            continue
        last, body = found.get(target, (0, {target}))
        todo = [index]
        while todo:
            node = todo.pop()
            if node not in body:
                body.add(node)
                todo += before[node]
        found[target] = max(last, index), body
    bodies = {first: frozenset(body) for first, (_, body) in found.items()}
    return [
        Loop(first, last, bodies[first], sum(bodies[first] < other for other in bodies.values()))
        for first, (last, _) in sorted(found.items())
    ]


def innermost(found: Sequence[Loop], index: int) -> Loop | None:
    """The smallest loop that holds an instruction."""
    around = [loop for loop in found if index in loop]
    return min(around, key=lambda loop: len(loop.body), default=None)


def is_branch(step: Step) -> bool:
    return step.root in ("BRA", "bra", "UBRA", "JMP")


def is_conditional(step: Instruction | Step) -> bool:
    """A guard, or (BRA.U !UP0, `(label)) a predicate among the operands."""
    operands = getattr(step, "operands", "")
    return bool(step.guard) or "," in operands or ".DIV" in step.opcode or ".ANY" in step.opcode


def successors(listing: Listing, index: int) -> list[int]:
    """Indices that may run next."""
    step = listing.instructions[index]
    following = [index + 1] if index + 1 < len(listing.instructions) else []
    if step.root in ("EXIT", "ret", "exit", "RET"):
        return following if step.guard else []
    if step.root == "CALL":
        return following + _targets(listing, step)
    if is_branch(step):
        return _targets(listing, step) + (following if is_conditional(step) else [])
    if step.root in ("BRX", "JMX", "brx"):
        # An indirect branch may go anywhere: give up on precision, not on safety.
        return list(range(len(listing.instructions)))
    return following


def _targets(listing: Listing, step: Step) -> list[int]:
    target = listing.index_of(step.target) if step.target else None
    return [] if target is None else [target]


def edges(listing: Listing) -> list[list[int]]:
    """The control-flow graph: for each index, those that may run next."""
    return [successors(listing, index) for index in range(len(listing.instructions))]


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


_REGISTER = re.compile(r"^(U?R)(\d+)")
_ZERO_MOVES = ("MOV", "UMOV", "IMAD.MOV.U32", "IMAD.MOV", "HFMA2.MMA", "HFMA2")
_WIDE_ROOTS = {"LDSM": 4, "HMMA": 4, "IMMA": 4, "CS2R": 2}
# Opcodes of these groups have one 32-bit result unless a suffix says more; others may have two.
_NARROW_GROUPS = (MATH, LOAD, INTEGER, MOVE)
_NO_DESTINATION = {"STG", "STS", "STL", "ST", "RED", "BAR", "BRA", "EXIT", "UTMALDG", "UTMASTG"}


def zero_writes(step: Instruction) -> tuple[str, ...]:
    """Registers that this instruction sets to zero ("R10", "UR4"); empty for any other."""
    names = _split(step.operands)
    found = _REGISTER.match(names[0]) if names else None
    if not found:
        return ()
    sources = [n for n in names[1:] if n]
    if step.root == "CS2R" and sources == ["SRZ"]:
        return _span(found, 1 if step.opcode == "CS2R.32" else 2)
    if step.opcode in _ZERO_MOVES and sources and all(_is_zero(s) for s in sources):
        return _span(found, 1)
    return ()


def written(step: Instruction) -> tuple[str, ...]:
    """Registers an instruction may overwrite; errs on the side of more."""
    if step.root in _NO_DESTINATION:
        return ()
    for name in _split(step.operands)[:2]:  # a predicate destination may come first
        found = _REGISTER.match(name)
        if found:
            return _span(found, _width(step))
    return ()


def _width(step: Instruction) -> int:
    shape = re.match(r"[A-Z]GMMA\.64x(\d+)x", step.opcode)
    if shape:
        return int(shape.group(1)) // 2
    if ".128" in step.opcode:
        return 4
    if any(part in step.opcode for part in (".64", ".WIDE", ".F64")):
        return 2
    return _WIDE_ROOTS.get(step.root, 1 if step.group in _NARROW_GROUPS else 2)


def _span(found: re.Match[str], count: int) -> tuple[str, ...]:
    kind, first = found.group(1), int(found.group(2))
    return tuple(f"{kind}{first + i}" for i in range(count))


def _split(operands: str) -> list[str]:
    return [name.strip().removesuffix(".reuse") for name in operands.split(",")]


def _is_zero(operand: str) -> bool:
    return operand.lstrip("-") in ("RZ", "URZ", "0", "0x0", "SRZ")


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
    known: list[int | None] = [None] * len(steps)  # None: not reached yet
    todo = [0] if steps else []
    if steps:
        known[0] = 0
    while todo:
        index = heapq.heappop(todo)
        before = known[index] or 0
        after = before | zeroed[index] if zeroed[index] else before & ~killed[index]
        if zeroed[index] and steps[index].guard and zeroed[index] & ~before:
            after &= ~zeroed[index]  # written by some threads only
        for following in graph[index]:
            old = known[following]
            new = after if old is None else old & after
            if new != old:
                known[following] = new
                heapq.heappush(todo, following)
    return [
        index
        for index, zeros in enumerate(zeroed)
        if zeros and (held := known[index]) is not None and not zeros & ~held
    ]
