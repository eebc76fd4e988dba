"""Which items of work an attention launch has, decided on the device from the lengths of the step.

A request with few query rows (a decode, a verification, the end of a chunk) is small: its items are
tiles of 16 rows, and its 256-key splits may run as items of their own, whose partial results one of
them merges. Any other request is large: tiles of many rows, each of which walks over its splits itself.
Nothing here changes a bit of the result, only where it is computed. The host reads nothing back, so
a captured graph serves any mix of lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.errors import KernelError
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch

SPLIT_SIZE = 256
"""Keys whose softmax is one unit, at absolute positions from 0, in every backend."""
SMALL_ROWS = 16
"""Rows of a small item: the least that an MMA takes."""
SMALL_TILES = 4
"""A request is small up to this many small tiles; beyond, a large tile is better filled."""

_SPLIT = tl.constexpr(SPLIT_SIZE)
_ROWS = tl.constexpr(SMALL_ROWS)
_TILES = tl.constexpr(SMALL_TILES)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the attention kernels are compiled for: the layer, the cache, and the most requests.

    What follows from these is stored, too: Triton's cache of binaries knows a shape by its text.
    """

    num_kv_heads: int
    group: int
    """Query heads that share a kv head."""
    head_dim: int
    block_size: int
    window: int
    """Keys that a token sees, itself included; 0: all."""
    capacity: int
    """Requests that a plan has room for, a power of two."""
    block_dim: int = field(init=False)
    """Columns of a tile: head_dim or the next power of two."""
    block_token: int = field(init=False)
    """Values of a token in the query, or the next power of two."""
    block_shift: int = field(init=False)
    """Of a position, to its block."""
    large_rows: int = field(init=False)
    """Rows of a large item: what leaves an accumulator in registers, twice."""

    def __post_init__(self) -> None:
        block_dim = _power_of_two(self.head_dim)
        block_token = _power_of_two(self.num_kv_heads * self.group * self.head_dim)
        object.__setattr__(self, "block_dim", block_dim)
        object.__setattr__(self, "block_token", block_token)
        object.__setattr__(self, "block_shift", self.block_size.bit_length() - 1)
        object.__setattr__(self, "large_rows", 128 if block_dim <= 128 else 64)


def _power_of_two(number: int) -> int:
    """The next one from `number` on."""
    return 1 << (number - 1).bit_length()


# Specialised values would make other machine code for 1 request and for 16.
@triton.jit(
    do_not_specialize=["num_requests", "num_programs", "workspace_rows"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
def _plan(
    query_start_loc, seq_lens, plan, num_requests, num_programs, workspace_rows,
    SHAPE: tl.constexpr,
):  # fmt: skip
    request = tl.arange(0, SHAPE.capacity)
    live = request < num_requests
    start = tl.load(query_start_loc + request, mask=live, other=0)
    end = tl.load(query_start_loc + request + 1, mask=live, other=0)
    seq_len = tl.load(seq_lens + request, mask=live, other=0)
    rows = (end - start) * SHAPE.group
    splits = tl.cdiv(seq_len, _SPLIT)
    if SHAPE.window:
        splits -= tl.maximum(seq_len - (end - start) - SHAPE.window + 1, 0) // _SPLIT
    small = (rows > 0) & (rows <= _ROWS * _TILES)
    walks = tl.where(small, tl.cdiv(rows, _ROWS) * SHAPE.num_kv_heads, 0)

    # A walk well below what each program has to do anyway may stay whole, which saves its merge.
    share = tl.sum(walks.to(tl.int64) * splits, 0) // num_programs
    apart = small & (splits > 1) & (splits * 4 > share)
    # Requests whose partial results find no room stay whole, too.
    needed = tl.where(apart, rows.to(tl.int64) * splits * SHAPE.num_kv_heads, 0)
    after = tl.cumsum(needed, 0)
    apart = apart & (after <= workspace_rows)

    large = tl.where(small, 0, tl.cdiv(rows, SHAPE.large_rows) * SHAPE.num_kv_heads)
    tl.store(plan + request, tl.cumsum(tl.where(apart, walks * splits, walks), 0))
    tl.store(plan + SHAPE.capacity + request, tl.cumsum(large, 0))
    first = tl.where(apart, after - needed, -1).to(tl.int32)
    tl.store(plan + 2 * SHAPE.capacity + request, first)
    tl.store(plan + 3 * SHAPE.capacity, tl.max(end, 0))


def plan_capacity(max_num_seqs: int) -> int:
    """`capacity` for at most max_num_seqs requests a step; few differ only in what must be compiled."""
    return max(16, _power_of_two(max_num_seqs))


def empty_plan(shape: AttentionShape, device: torch.device) -> Tensor:
    """(3 capacity + 1,) int32 for `plan_attention`.

    One number a request in each of three parts: small items up to and with the request; large items
    likewise; the first row of its partial results, -1 if its splits are not apart. Then the tokens.
    """
    return torch.zeros(3 * shape.capacity + 1, dtype=torch.int32, device=device)


def plan_attention(
    query_start_loc: Tensor, seq_lens: Tensor, plan: Tensor, num_programs: int, workspace_rows: int,
    shape: AttentionShape,
) -> None:  # fmt: skip
    """Fills `plan`, from `empty_plan`, for R requests.

    query_start_loc: (R + 1,) int32; seq_lens: (R,) int32. `num_programs`: of the small launch;
    `workspace_rows`: partial results that it can store. Raises KernelError for more requests than
    the plan has room for.
    """
    requests = len(seq_lens)
    if requests > shape.capacity:
        raise KernelError(f"{requests} requests do not fit a plan for {shape.capacity}")
    launch(
        _plan, (1,), query_start_loc, seq_lens, plan, requests, num_programs, workspace_rows,
        SHAPE=shape, num_warps=4,
    )  # fmt: skip
