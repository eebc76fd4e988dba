"""Mixture of experts around its products: which experts a token goes to, and the sum of their answers.

A pair is a token with one of its experts: pair token * top_k + slot. All is decided on the device with
nothing read back, so that a captured graph serves any routing, and a token's row depends on it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch, row_options


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens of a step go."""

    experts: Tensor
    """(T, top_k) int, best first; the number of experts, which is none, for a padding row."""
    weights: Tensor
    """(T, top_k) fp32: of the answers; 0 in a padding row."""


@dataclass(frozen=True, slots=True)
class PairOrder:
    """The pairs of a step in order of their experts."""

    pairs: Tensor
    """(T * top_k,) int32, rising within an expert; what is behind the last expert's is undefined."""
    bounds: Tensor
    """(2, num_experts) int32: where each expert's pairs begin and end among them."""


def experts_block(num_experts: int) -> int:
    """Lanes for all experts: a power of two, as Triton wants."""
    return max(16, 1 << (num_experts - 1).bit_length())


@triton.jit
def _route(
    scores, slot_mapping, experts, weights, row_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < EXPERTS
    left = tl.load(scores + row * row_stride + column, mask=inside, other=-float("inf"))
    left = left.to(tl.float32)
    weight = tl.exp(left - tl.max(left, 0))
    total = tl.sum(weight, 0)
    if RENORMALISE:
        total = 0.0
        rest = left
        for _ in tl.static_range(TOP_K):
            best = tl.min(tl.where(rest == tl.max(rest, 0), column, EXPERTS - 1), 0)
            total += tl.sum(tl.where(column == best, weight, 0.0), 0)
            rest = tl.where(column == best, -float("inf"), rest)
    live = tl.load(slot_mapping + row) >= 0
    for slot in tl.static_range(TOP_K):
        # The first of equals; for a row of NaN, which equals nothing, the last expert.
        best = tl.min(tl.where(left == tl.max(left, 0), column, EXPERTS - 1), 0)
        picked = tl.sum(tl.where(column == best, weight, 0.0), 0)
        tl.store(experts + row * TOP_K + slot, tl.where(live, best, EXPERTS))
        tl.store(weights + row * TOP_K + slot, tl.where(live, picked / total, 0.0))
        left = tl.where(column == best, -float("inf"), left)


def route(
    scores: Tensor, slot_mapping: Tensor, num_experts: int, top_k: int, renormalise: bool
) -> Routing:
    """scores: (T, num_experts or more), rows contiguous; slot_mapping: (T,), negative: padding."""
    rows = scores.shape[0]
    experts = scores.new_empty(rows, top_k, dtype=torch.int32)
    weights = scores.new_empty(rows, top_k, dtype=torch.float32)
    launch(
        _route, (rows,), scores, slot_mapping, experts, weights, scores.stride(0),
        EXPERTS=num_experts, TOP_K=top_k, RENORMALISE=renormalise,
        BLOCK=experts_block(num_experts), num_warps=1,
    )  # fmt: skip
    return Routing(experts, weights)


def reference_route(scores: Tensor, num_experts: int, top_k: int, renormalise: bool) -> Routing:
    """`route` in plain torch, without padding rows."""
    wide = scores[:, :num_experts].float()
    # Not torch.topk: which of equal scores it takes is not said.
    experts = wide.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = torch.softmax(wide, -1).gather(1, experts)
    if renormalise:
        weights /= weights.sum(-1, keepdim=True)
    return Routing(experts, weights)


# A specialised number would make other machine code for 1 pair and for 16.
@triton.jit(do_not_specialize=["num_pairs"])
def _order_pairs(experts, pairs, begins, ends, num_pairs, BLOCK: tl.constexpr):
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + lane
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=mine)
        before += (expert < mine).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(begins + mine, place)
    for first in range(0, num_pairs, BLOCK):
        pair = first + lane
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        taken = (expert == mine).to(tl.int32)
        upto = tl.cumsum(taken, 0)
        tl.store(pairs + place + upto - 1, pair, mask=expert == mine)
        place += tl.sum(taken, 0)
    tl.store(ends + mine, place)


def order_pairs(experts: Tensor, num_experts: int) -> PairOrder:
    """experts: (T, top_k) int32 from `route`."""
    pairs = torch.empty_like(experts).view(-1)
    bounds = experts.new_empty(2, num_experts)
    launch(
        _order_pairs, (num_experts,), experts, pairs, bounds[0], bounds[1], len(pairs),
        BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return PairOrder(pairs, bounds)


@triton.jit
def _combine(
    answers, experts, weights, shared, scores, out, row_stride,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = row * TOP_K + slot
        answered = tl.load(experts + pair) < EXPERTS
        answer = tl.load(answers + pair * SIZE + column, mask=inside & answered, other=0.0)
        total += tl.load(weights + pair) * answer.to(tl.float32)
    if SHARED:
        gate = tl.load(scores + row * row_stride + EXPERTS).to(tl.float32)
        always = tl.load(shared + row * SIZE + column, mask=inside, other=0.0)
        total += always.to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), mask=inside)


def combine(
    answers: Tensor, routing: Routing, num_experts: int, scores: Tensor, shared: Tensor | None
) -> Tensor:
    """Each token's weighted answers added up in fp32, best expert first, rounded once.

    answers: (T * top_k, size), a row for each pair; shared: (T, size) of the expert that every token
    uses, with sigmoid(scores[:, num_experts]) as its weight, added last. -> (T, size).
    """
    rows, top_k = routing.experts.shape
    size = answers.shape[1]
    out = answers.new_empty(rows, size)
    options = row_options(size)
    launch(
        _combine, (rows, -(-size // options["BLOCK"])), answers, routing.experts, routing.weights,
        answers if shared is None else shared, scores, out, scores.stride(0),
        SIZE=size, EXPERTS=num_experts, TOP_K=top_k, SHARED=shared is not None, **options,
    )  # fmt: skip
    return out


def reference_combine(
    answers: Tensor, routing: Routing, num_experts: int, scores: Tensor, shared: Tensor | None
) -> Tensor:
    """`combine` in plain torch, without padding rows."""
    rows, top_k = routing.experts.shape
    wide = answers.view(rows, top_k, -1).float() * routing.weights[:, :, None]
    total = wide[:, 0]
    for slot in range(1, top_k):
        total = total + wide[:, slot]
    if shared is not None:
        total = total + shared.float() / (1.0 + torch.exp(-scores[:, num_experts, None].float()))
    return total.to(answers.dtype)
