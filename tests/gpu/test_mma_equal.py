"""The measured fact under all our repeatability: a product has one result, whatever computes it.

For bf16 and fp16 with fp32 accumulation, mma.sync and wgmma, any tile, either order of the operands,
operands from registers or shared memory, and an accumulator carried in: equal bits, for normal and for
very wide data. The narrowest tile is n = 8, with mma.sync: Triton makes no wgmma below n = 16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.kernels.triton.lang import tl, triton

M, N, K = 256, 512, 2048
BF16_TILES = [
    (16, 8, 64, 4),
    (16, 128, 32, 4),
    (64, 8, 64, 4),
    (64, 16, 64, 4),
    (64, 64, 16, 4),
    (128, 64, 64, 8),
    (128, 256, 64, 8),
]
FP16_TILES = [(16, 8, 64, 4), (16, 128, 32, 4), (128, 64, 64, 8)]
SWAPPED_TILES = [(16, 8, 64, 4), (64, 16, 64, 4), (128, 64, 64, 8)]
CASES = [
    *((torch.bfloat16, tile, False) for tile in BF16_TILES),
    *((torch.bfloat16, tile, True) for tile in SWAPPED_TILES),
    *((torch.float16, tile, False) for tile in FP16_TILES),
    (torch.float16, SWAPPED_TILES[0], True),
]


@triton.jit(do_not_specialize=["rows", "columns"])
def product(
    a, b, out, rows, columns, stride_row, stride_column, DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[row, column] = a[row] . b[column], one chain of MMAs in rising k."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        left = tl.load(a + (row % rows)[:, None] * DEPTH + (k + step)[None, :])
        right = tl.load(b + (column % columns)[:, None] * DEPTH + (k + step)[None, :])
        total = tl.dot(left, tl.trans(right), total)
    place = out + row[:, None] * stride_row + column[None, :] * stride_column
    tl.store(place, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def weighted(
    scores, values, before, out, totals, KEYS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """For each 64 keys: out is halved, then exp2(scores) @ values is added; totals the same with ones."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    state = tl.load(before + row[:, None] * DIM + dim[None, :])
    dtype = values.dtype.element_ty
    ones = tl.full((64, 8), 1.0, tl.float32).to(dtype)
    total = tl.zeros((ROWS, 8), tl.float32)
    for first in range(0, KEYS, 64):
        key = first + tl.arange(0, 64)
        score = tl.load(scores + row[:, None] * KEYS + key[None, :])
        weight = tl.exp2(score).to(dtype)
        value = tl.load(values + key[:, None] * DIM + dim[None, :])
        total = tl.dot(weight, ones, total * 0.5)
        state = tl.dot(weight, value, state * 0.5)
    tl.store(out + row[:, None] * DIM + dim[None, :], state)
    tl.store(totals + row, tl.max(total, 1))


def spread(shape: tuple[int, ...], wide: bool, seed: int) -> torch.Tensor:
    """Normal numbers, or such times powers of two over 24 binades."""
    generator = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randn(shape, device="cuda", generator=generator)
    if wide:
        binades = torch.randint(-12, 12, shape, device="cuda", generator=generator)
        numbers *= torch.exp2(binades.float())
    return numbers


def multiply(
    a: torch.Tensor, b: torch.Tensor, tile: tuple[int, int, int, int], swapped: bool
) -> tuple[torch.Tensor, str]:
    """(rows of a, rows of b) fp32, and the instruction; swapped: b's rows are the tile's M."""
    out = torch.full((len(a), len(b)), float("nan"), device="cuda")
    left, right, strides = (b, a, (1, len(b))) if swapped else (a, b, (len(b), 1))
    block_m, block_n, block_k, num_warps = tile
    grid = (triton.cdiv(len(left), block_m), triton.cdiv(len(right), block_n))
    kernel: Any = product[grid](
        left, right, out, len(left), len(right), *strides, K, block_m, block_n, block_k,
        num_warps=num_warps,
    )  # fmt: skip
    return out, "wgmma" if "wgmma.mma_async" in kernel.asm["ptx"] else "mma.sync"


@pytest.mark.parametrize("wide", [False, True], ids=["normal", "wide"])
@pytest.mark.parametrize(("dtype", "tile", "swapped"), CASES, ids=str)
def test_products(
    dtype: torch.dtype, tile: tuple[int, int, int, int], swapped: bool, wide: bool
) -> None:
    # fp16 has no room for the product of two wide numbers in a result, but the sum is fp32.
    a, b = spread((M, K), wide, 1).to(dtype), spread((N, K), wide, 2).to(dtype)
    expected, kind = multiply(a, b, (64, 64, 64, 4), False)
    assert kind == "wgmma"
    reference = a.double() @ b.double().T
    error = (expected.double() - reference).abs().max() / reference.abs().max()
    assert error < 1e-4
    for rows in (1, 7, 16, 64, M):
        got, kind = multiply(a[:rows].contiguous(), b, tile, swapped)
        assert torch.equal(got, expected[:rows]), f"{rows} rows by {kind}"
    if tile[0] == 16:
        assert kind == "mma.sync"
    elif tile[1] >= 16:
        assert kind == "wgmma"


@pytest.mark.parametrize("wide", [False, True], ids=["normal", "wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_from_registers_onto_a_carried_accumulator(dtype: torch.dtype, wide: bool) -> None:
    rows, keys, dim = 256, 256, 128
    scores = -spread((rows, keys), False, 3).abs() * 4
    # Rows whose weights are exact zeros must leave the accumulator as it is.
    scores[::5] = float("-inf")
    values = spread((keys, dim), wide, 4).to(dtype)
    before = spread((rows, dim), wide, 5)
    results = []
    for size, num_warps in ((16, 4), (16, 1), (64, 4), (128, 8)):
        out, totals = torch.empty_like(before), torch.empty(rows, device="cuda")
        weighted[(rows // size,)](
            scores, values, before, out, totals, keys, dim, size, num_warps=num_warps
        )
        results.append((out, totals))
    for out, totals in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(totals, results[0][1])
    assert torch.equal(results[0][0][::5], before[::5] / 16)
    assert torch.isfinite(results[0][0]).all()
