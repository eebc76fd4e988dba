"""y = x W^T + b with one arithmetic for every number of rows: the `fixed` GEMM.

Each output is one chain of k16 MMAs over K in rising order, in fp32, plus the bias, rounded once.
Neither the tile's shape nor the MMA instruction changes these bits (docs/architecture.md, "What makes
results repeatable"), so the tile may follow the number of rows, and speed is all that it changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.errors import KernelError
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch


@dataclass(frozen=True)
class Tile:
    """Outputs of one program (rows x columns), its step along K, and its warps and pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int | bool]:
        """As the kernels' constexprs, warps and stages."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "GROUP": 8, "num_warps": self.num_warps, "num_stages": self.num_stages}


# Decode reads each weight once: narrow tiles, so that all SMs have weights in flight.
SMALL = Tile(16, 32, 128, num_warps=4, num_stages=5)
MEDIUM = Tile(64, 64, 64, num_warps=4, num_stages=5)
LARGE = Tile(128, 128, 64, num_warps=8, num_stages=3)
TILES = (SMALL, MEDIUM, LARGE)

_ENOUGH_TILES = 132
"""One for each SM of an H200; with fewer LARGE tiles, MEDIUM ones keep more of the chip busy."""


def choose_tile(num_rows: int, out_features: int) -> Tile:
    """The tile for a product of this size. A matter of speed only: all tiles give the same bits."""
    if num_rows <= SMALL.block_m:
        return SMALL
    tiles = -(-num_rows // LARGE.block_m) * -(-out_features // LARGE.block_n)
    return LARGE if num_rows > MEDIUM.block_m and tiles >= _ENOUGH_TILES else MEDIUM


@triton.jit
def chain(
    left, right, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) fp32: the chain of MMAs that gives an output its bits, in every GEMM here.

    left: (BLOCK_M, BLOCK_K) and right: (BLOCK_K, BLOCK_N) pointers at the first step along K.
    """
    step = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(left), tl.load(right)
        else:  # Zeros add nothing to the chain.
            a = tl.load(left, mask=step[None, :] < k - start, other=0.0)
            b = tl.load(right, mask=step[:, None] < k - start, other=0.0)
        total = tl.dot(a, b, total)
        left += BLOCK_K
        right += BLOCK_K
    return total


# The sizes come unspecialised, or there would be other machine code for 1 row and for 16.
@triton.jit(do_not_specialize=["num_rows", "n_by_8", "k_by_8"])
def _fixed_linear(
    x, weight, bias, y, num_rows, n_by_8, k_by_8,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # Multiples of 8 that the compiler can see as such: rows start at 16 bytes.
    n, k = n_by_8 * 8, k_by_8 * 8
    # GROUP row tiles walk over all columns together, so that the weights they share stay in L2.
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    within = tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    row = (group * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)

    # Beyond the edge the last row or column is read again; nothing of it is stored.
    step = tl.arange(0, BLOCK_K)
    left = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * k + step[None, :]
    right = weight + tl.minimum(column, n - 1).to(tl.int64)[None, :] * k + step[:, None]
    total = chain(left, right, k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    if BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = y + row.to(tl.int64)[:, None] * n + column[None, :]
    inside = (row < num_rows)[:, None] & (column < n)[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)


@cache
def launch_options(tile: Tile, even_k: bool, bias: bool) -> dict[str, int | bool]:
    """Constexprs, warps and stages. `even_k`: K is a multiple of the tile's step."""
    return {"BIAS": bias, "EVEN_K": even_k, **tile.options()}


def fixed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x: (M, K); weight: (N, K); bias: (N,) -> (M, N) in x's dtype, bf16 or fp16, in `out` if given.

    A row's bits depend on that row only, whatever M is. All contiguous; N and K are multiples of 8,
    M is any number. Raises KernelError for what does not fit.
    """
    check_operands("fixed_linear", x, weight)
    return linear_by_tile(x, weight, bias, choose_tile(x.shape[0], weight.shape[0]), out)


def check_operands(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise KernelError unless `name` can multiply x: (M, K) by weight: (..., N, K) transposed."""
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"{name} takes bf16 or fp16, not {x.dtype} and {weight.dtype}")
    if not x.is_contiguous() or not weight.is_contiguous():
        raise KernelError(f"{name} needs contiguous operands")
    n, k = weight.shape[-2:]
    if x.shape[1] != k or n % 8 or k % 8:
        raise KernelError(f"{name} cannot multiply {tuple(x.shape)} by {(n, k)} transposed")


def linear_by_tile(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, out: Tensor | None = None
) -> Tensor:
    """`fixed_linear` of operands that fit, with a given tile."""
    rows, (n, k) = x.shape[0], weight.shape
    y = x.new_empty(rows, n) if out is None else out
    options = launch_options(tile, k % tile.block_k == 0, bias is not None)
    programs = -(-rows // tile.block_m) * -(-n // tile.block_n)
    launch(_fixed_linear, (programs,), x, weight, bias, y, rows, n // 8, k // 8, **options)
    return y
