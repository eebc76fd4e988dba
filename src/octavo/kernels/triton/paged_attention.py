"""Paged attention on the GPU: persistent kernels for requests of few rows and of many, and their launch.

Programs take items of the plan (attention_plan.py) until there are none; what an item computes is in
attention_reduction.py, and does not depend on the item.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.errors import KernelError
from octavo.kernels.triton.attention_plan import SMALL_ROWS, SMALL_TILES, AttentionShape
from octavo.kernels.triton.attention_reduction import (
    SPLIT,
    SPLIT_TILES,
    TILE,
    attend_rows,
    empty_state,
    merge,
    store_rows,
)
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch

_SMALL_ROWS = tl.constexpr(SMALL_ROWS)
_SMALL_TILES = tl.constexpr(SMALL_TILES)


@triton.jit
def _find(ends, item, query_start_loc, seq_lens, SHAPE: tl.constexpr):
    """The request of an item, the item's place in it, and the request's start and lengths."""
    before = tl.load(ends + tl.arange(0, SHAPE.capacity)) <= item
    request = tl.sum(before.to(tl.int32), 0)
    place = item - tl.load(ends + request - 1, mask=request > 0, other=0)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    return request, place, start, query_len, tl.load(seq_lens + request)


@triton.jit
def _next(tickets, num_items):
    """Each program's first item is its own number; the others are drawn, where there are others."""
    item = num_items
    if num_items > tl.num_programs(0):
        item = tl.num_programs(0) + tl.atomic_add(tickets, 1)
    return item


@triton.jit
def _finish(tickets, num_items):
    """The last program to come leaves the tickets as the next launch wants them."""
    if num_items > tl.num_programs(0):
        last = tl.atomic_add(tickets + 1, 1) == tl.num_programs(0) - 1
        if last:
            tl.store(tickets, 0)
            tl.store(tickets + 1, 0)


# Lists may start anywhere in a buffer; that must not be another compilation, nor must a number of tokens.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables", "query_start_loc", "seq_lens", "tickets"],
)
def attend_large(
    query, out, cache, tables, query_start_loc, seq_lens, plan, tickets,
    query_stride, table_stride, block_stride, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    """Requests of many rows. An item is a tile of one kv head, a request's longest walks first."""
    ends = plan + SHAPE.capacity
    num_items = tl.load(ends + SHAPE.capacity - 1)
    item = tl.program_id(0)
    while item < num_items:
        request, place, start, query_len, seq_len = _find(
            ends, item, query_start_loc, seq_lens, SHAPE
        )
        head = place % SHAPE.num_kv_heads
        last_tile = tl.cdiv(query_len * SHAPE.group, SHAPE.large_rows) - 1
        first_row = (last_tile - place // SHAPE.num_kv_heads) * SHAPE.large_rows
        _, total, summed = attend_rows(
            query, cache, tables + request.to(tl.int64) * table_stride, start, first_row,
            query_len, seq_len, head, 0, tl.cdiv(seq_len, TILE),
            query_stride, block_stride, scale, SHAPE.large_rows, SHAPE,
        )  # fmt: skip
        row = first_row + tl.arange(0, SHAPE.large_rows)
        store_rows(out, start, row, query_len, head, total, summed, SHAPE)
        item = _next(tickets, num_items)
    _finish(tickets, num_items)


@triton.jit
def _parts(partial_out, partial_state, first, row, num_rows, SHAPE: tl.constexpr):
    """Where a split's partial results of rows are: peak, total, out; and the masks of the two."""
    dim = tl.arange(0, SHAPE.block_dim)[None, :]
    inside = row < num_rows
    at = first + row
    place = partial_out + at[:, None] * SHAPE.head_dim + dim
    columns = inside[:, None] & (dim < SHAPE.head_dim)
    return partial_state + 2 * at, partial_state + 2 * at + 1, place, inside, columns


@triton.jit
def _put_part(
    partial_out, partial_state, arrival, first, parts, row, num_rows, peak, total, out,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Stores the partial result of one split. True for the program that came last."""
    peaks, totals, outs, inside, columns = _parts(
        partial_out, partial_state, first, row, num_rows, SHAPE
    )
    tl.store(peaks, peak, mask=inside)
    tl.store(totals, total, mask=inside)
    tl.store(outs, out, mask=columns)
    # What every thread has stored comes before the arrival, which releases it and acquires the rest.
    tl.debug_barrier()
    last = tl.atomic_add(arrival, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(arrival, 0)
    return last


@triton.jit
def _merge_parts(
    partial_out, partial_state, first, step, parts, row, num_rows, SHAPE: tl.constexpr
):
    """Partial results of rows, merged in the order of their splits: total and out."""
    peak, total, out = empty_state(_SMALL_ROWS, SHAPE.block_dim)
    for part in tl.range(0, parts, num_stages=3):
        peaks, totals, outs, inside, columns = _parts(
            partial_out, partial_state, first + part * step, row, num_rows, SHAPE
        )
        peak_s = tl.load(peaks, mask=inside, other=0.0)
        total_s = tl.load(totals, mask=inside, other=0.0)
        out_s = tl.load(outs, mask=columns, other=0.0)
        peak, total, out = merge(peak, total, out, peak_s, total_s, out_s)
    return total, out


@triton.jit
def _zero_padding(out, first, end, SHAPE: tl.constexpr):
    """Zeros in the rows of the tokens that belong to no request."""
    size: tl.constexpr = SHAPE.num_kv_heads * SHAPE.group * SHAPE.head_dim
    column = tl.arange(0, SHAPE.block_token)
    zeros = tl.full((SHAPE.block_token,), 0.0, tl.float32).to(out.dtype.element_ty)
    for token in tl.range(first.to(tl.int64) + tl.program_id(0), end, tl.num_programs(0)):
        tl.store(out + token * size + column, zeros, mask=column < size)


@triton.jit(
    do_not_specialize=["table_stride", "num_tokens"],
    do_not_specialize_on_alignment=["tables", "query_start_loc", "seq_lens", "tickets"],
)
def attend_small(
    query, out, cache, tables, query_start_loc, seq_lens, plan, tickets,
    query_stride, table_stride, block_stride, scale,
    partial_out, partial_state, arrivals, num_tokens, SHAPE: tl.constexpr,
):  # fmt: skip
    """Requests of few rows. An item is 16 rows of one kv head, and one split if those are apart.

    The last of the splits to arrive merges all of them. Rows of padding tokens become zero here.
    """
    _zero_padding(out, tl.load(plan + 3 * SHAPE.capacity), num_tokens, SHAPE)
    num_items = tl.load(plan + SHAPE.capacity - 1)
    item = tl.program_id(0)
    while item < num_items:
        request, place, start, query_len, seq_len = _find(
            plan, item, query_start_loc, seq_lens, SHAPE
        )
        num_rows = query_len * SHAPE.group
        tiles = tl.cdiv(num_rows, _SMALL_ROWS)
        head, place = place % SHAPE.num_kv_heads, place // SHAPE.num_kv_heads
        tile, part = place % tiles, place // tiles
        first_row = tile * _SMALL_ROWS
        partial = tl.load(plan + 2 * SHAPE.capacity + request)
        parts, first_tile, end_tile = tl.cdiv(seq_len, SPLIT), 0, tl.cdiv(seq_len, TILE)
        if partial >= 0:
            first_split = part
            if SHAPE.window:
                unseen = tl.maximum(seq_len - query_len - SHAPE.window + 1, 0) // SPLIT
                first_split += unseen
                parts -= unseen
            first_tile = first_split * SPLIT_TILES
            end_tile = first_tile + SPLIT_TILES
        peak, total, summed = attend_rows(
            query, cache, tables + request.to(tl.int64) * table_stride, start, first_row,
            query_len, seq_len, head, first_tile, end_tile,
            query_stride, block_stride, scale, _SMALL_ROWS, SHAPE,
        )  # fmt: skip
        row = first_row + tl.arange(0, _SMALL_ROWS)
        done = True
        if partial >= 0:
            first = partial.to(tl.int64) + head * num_rows
            step = num_rows * SHAPE.num_kv_heads
            arrival = arrivals + (request * _SMALL_TILES + tile) * SHAPE.num_kv_heads + head
            done = _put_part(
                partial_out, partial_state, arrival, first + part * step, parts, row, num_rows,
                peak, total, summed, SHAPE,
            )  # fmt: skip
            if done:
                total, summed = _merge_parts(
                    partial_out, partial_state, first, step, parts, row, num_rows, SHAPE
                )
        if done:
            store_rows(out, start, row, query_len, head, total, summed, SHAPE)
        item = _next(tickets, num_items)
    _finish(tickets, num_items)


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the programs of a launch share. One launch at a time uses it, and leaves it as it was."""

    partial_out: Tensor
    """(rows, head_dim) fp32."""
    partial_state: Tensor
    """(rows, 2) fp32: peak and total."""
    arrivals: Tensor
    """(capacity * SMALL_TILES * num_kv_heads,) int32: splits that are done; zeros between launches."""
    tickets: Tensor
    """(2, 2) int32: items drawn and programs done, small and large; zeros between launches."""

    @classmethod
    def allocate(cls, shape: AttentionShape, rows: int, device: torch.device) -> Workspace:
        """With room for `rows` partial results: of one head of one token in one split."""
        arrivals = shape.capacity * SMALL_TILES * shape.num_kv_heads
        return cls(
            torch.empty(rows, shape.head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, 2, dtype=torch.float32, device=device),
            torch.zeros(arrivals, dtype=torch.int32, device=device),
            torch.zeros(2, 2, dtype=torch.int32, device=device),
        )


@cache
def launch_options(shape: AttentionShape, large: bool) -> dict[str, Any]:
    """Constexprs, warps and stages of either kernel: a matter of the layer's shape only."""
    return {
        "SHAPE": shape,
        "num_warps": 8 if large or shape.block_dim > 128 else 4,
        # Tiles of K and V in flight: as many as leave room for the tile of queries.
        "num_stages": 3 if shape.block_dim <= 128 else 2,
    }


def programs_per_sm(shape: AttentionShape, large: bool) -> int:
    """How many programs of either kernel an SM has room for, by registers."""
    return 1 if large else {256: 1, 128: 2}.get(shape.block_dim, 3)


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of a step on the device, and the plan of their work."""

    query_start_loc: Tensor
    """(R + 1,) int32."""
    seq_lens: Tensor
    """(R,) int32."""
    block_tables: Tensor
    """(R, max_blocks) int32, rows may be apart."""
    plan: Tensor
    """From `plan_attention`."""
    only_small: bool
    """The host knows that no request is large."""


def paged_attention(
    query: Tensor, kv_cache: Tensor, step: Step, workspace: Workspace, scale: float,
    shape: AttentionShape, num_sms: int,
) -> Tensor:  # fmt: skip
    """Causal attention of T tokens over their requests' K and V, which are in the cache.

    query: (T, num_heads, head_dim), each token contiguous; kv_cache: (num_blocks, 2, num_kv_heads,
    block_size, head_dim) of the same dtype, bf16 or fp16, each block contiguous. Returns the shape of
    `query`; tokens past the last request get zeros. Waits for nothing. Raises KernelError for
    operands laid out otherwise, and for a scale that is not positive.
    """
    _check(query, kv_cache, step, shape)
    if not scale > 0:
        raise KernelError(f"attention needs a positive scale, not {scale}")  # peaks are scaled
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # exp2 is what the hardware has.
    factor = scale * math.log2(math.e)
    shared = (
        query, out, kv_cache, step.block_tables, step.query_start_loc, step.seq_lens, step.plan
    )  # fmt: skip
    strides = (query.stride(0), step.block_tables.stride(0), kv_cache.stride(0))
    small, large = launch_options(shape, False), launch_options(shape, True)
    if not step.only_small:
        grid = (num_sms * programs_per_sm(shape, True),)
        launch(attend_large, grid, *shared, workspace.tickets[1], *strides, factor, **large)
    grid = (num_sms * programs_per_sm(shape, False),)
    launch(
        attend_small, grid, *shared, workspace.tickets[0], *strides, factor,
        workspace.partial_out, workspace.partial_state, workspace.arrivals, len(query), **small,
    )  # fmt: skip
    return out


def _check(query: Tensor, kv_cache: Tensor, step: Step, shape: AttentionShape) -> None:
    heads = shape.num_kv_heads * shape.group
    if query.dtype != kv_cache.dtype or query.dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"attention takes bf16 or fp16, not {query.dtype} and {kv_cache.dtype}")
    if query.shape[1:] != (heads, shape.head_dim) or query.stride()[1:] != (shape.head_dim, 1):
        raise KernelError(f"query {tuple(query.shape)} is not (tokens, {heads}, {shape.head_dim})")
    block = (2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    if kv_cache.shape[1:] != block or not kv_cache[0].is_contiguous():
        raise KernelError(f"kv_cache {tuple(kv_cache.shape)} is not made of contiguous {block}")
    if step.block_tables.stride(1) != 1:
        raise KernelError("the entries of a block table are not contiguous")
