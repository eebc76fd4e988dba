"""y = x W^T with each row's own W: the products of all experts in one launch.

A row has the bits that the `fixed` GEMM (linear.py) gives it with its expert's weight: one chain of
k16 MMAs over K, whatever the tile, the other rows of its expert, or the number of rows.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from octavo.kernels.triton.experts import PairOrder, experts_block
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.linear import LARGE, MEDIUM, SMALL, Tile, chain, check_operands


def choose_tile(num_pairs: int, num_experts: int) -> Tile:
    """By the mean number of rows of an expert. A matter of speed only."""
    mean = -(-num_pairs // num_experts)
    return next((tile for tile in (SMALL, MEDIUM) if mean <= tile.block_m), LARGE)


# The sizes come unspecialised, as in linear.py.
@triton.jit(do_not_specialize=["tiles_m", "n_by_8", "k_by_8"])
def _grouped_linear(
    x, weight, pairs, begins, ends, y, tiles_m, n_by_8, k_by_8,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    n, k = n_by_8 * 8, k_by_8 * 8
    # As in linear.py, but the row tiles are those of one expert after another.
    tiles_n = tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    within = tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    tile = group * GROUP + within % height
    column = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)

    lane = tl.arange(0, EXPERTS_BLOCK)
    begin = tl.load(begins + lane, mask=lane < EXPERTS, other=0)
    end = tl.load(ends + lane, mask=lane < EXPERTS, other=0)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:  # there are no more tiles than these
        return
    ours = lane == expert
    first = tl.sum(tl.where(ours, begin + (tile - upto + tiles) * BLOCK_M, 0), 0)
    last = tl.sum(tl.where(ours, end, 0), 0) - 1
    place = first + tl.arange(0, BLOCK_M)
    pair = tl.load(pairs + tl.minimum(place, last)).to(tl.int64)

    # Beyond the edge the last row or column is read again; nothing of it is stored.
    step = tl.arange(0, BLOCK_K)
    left = x + (pair // PAIRS_PER_ROW)[:, None] * k + step[None, :]
    feature = expert.to(tl.int64) * n + tl.minimum(column, n - 1)
    right = weight + feature[None, :] * k + step[:, None]
    total = chain(left, right, k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    inside = (place <= last)[:, None] & (column < n)[None, :]
    target = y + pair[:, None] * n + column[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)


@cache
def launch_options(
    tile: Tile, even_k: bool, num_experts: int, pairs_per_row: int
) -> dict[str, int | bool]:
    """Constexprs, warps and stages. `even_k`: K is a multiple of the tile's step."""
    experts = {"EXPERTS": num_experts, "EXPERTS_BLOCK": experts_block(num_experts)}
    return {**experts, "PAIRS_PER_ROW": pairs_per_row, "EVEN_K": even_k, **tile.options()}


def grouped_linear(x: Tensor, weight: Tensor, order: PairOrder, tile: Tile | None = None) -> Tensor:
    """x: (P / pairs per row, K), read once for each of a row's pairs; weight: (num_experts, N, K).

    Returns (P, N) in x's dtype, bf16 or fp16: for each of the P pairs its row of x by its expert's
    weight, and undefined rows for pairs without an expert. `tile`: by default `choose_tile`. All
    contiguous; N and K are multiples of 8. Raises KernelError for what does not fit.
    """
    check_operands("grouped_linear", x, weight)
    num_experts, n, k = weight.shape
    num_pairs = len(order.pairs)
    y = x.new_empty(num_pairs, n)
    if num_pairs:
        tile = tile or choose_tile(num_pairs, num_experts)
        # As many as there can be: each expert that has a row may waste all but one of a tile.
        tiles_m = (num_pairs + min(num_experts, num_pairs) * (tile.block_m - 1)) // tile.block_m
        options = launch_options(tile, k % tile.block_k == 0, num_experts, num_pairs // len(x))
        launch(
            _grouped_linear, (tiles_m * -(-n // tile.block_n),), x, weight, order.pairs,
            *order.bounds, y, tiles_m, n // 8, k // 8, **options,
        )  # fmt: skip
    return y
