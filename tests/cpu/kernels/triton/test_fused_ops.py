"""The small fused ops in Triton's interpreter against their torch oracles; rows know no neighbours."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.layers.fused import rope_and_cache_by_layers
from tests.cpu.paged import assert_same_bits

from octavo.errors import KernelError
from octavo.kernels.triton.activation import reference_silu_and_mul, silu_and_mul
from octavo.kernels.triton.embedding import embed
from octavo.kernels.triton.linear import (
    LARGE,
    MEDIUM,
    SMALL,
    TILES,
    Tile,
    choose_tile,
    fixed_linear,
    linear_by_tile,
)
from octavo.kernels.triton.norm import reference_rms_norm, rms_norm
from octavo.kernels.triton.rope_cache import rope_and_cache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMOLLM2, QWEN3 = (9, 3, 64, False), (16, 8, 128, True)


def assert_rounds_alike(got: torch.Tensor, expected: torch.Tensor, ulps: int = 1) -> None:
    """Within `ulps` of the dtype everywhere and equal nearly everywhere; NaN is never right."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    eps = torch.finfo(got.dtype).eps * (8 if got.dtype == torch.float32 else 1)
    error = (got.double() - expected.double()).abs()
    assert bool((error <= ulps * eps * expected.double().abs() + 1e-6).all())
    if got.dtype != torch.float32:
        assert (got != expected).double().mean() <= 0.02


@pytest.mark.parametrize("unit", [False, True], ids=["weight", "1+weight"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [60, 576])
def test_rms_norm(hidden: int, dtype: torch.dtype, unit: bool) -> None:
    x, residual = torch.randn(5, hidden).to(dtype), torch.randn(5, hidden).to(dtype)
    weight = torch.linspace(0.5, 1.5, hidden).to(dtype)
    expected, summed = reference_rms_norm(x, weight, 1e-5, residual, unit)
    mine = residual.clone()
    normed, returned = rms_norm(x, weight, 1e-5, mine, unit)
    assert returned is mine
    assert_same_bits(mine, summed)
    assert_rounds_alike(normed, expected, ulps=2)

    alone, same_x = rms_norm(summed, weight, 1e-5, unit_offset=unit)
    assert same_x is summed
    assert_same_bits(alone, normed)
    for row in range(5):
        mate = residual[row : row + 1].clone()
        single, _ = rms_norm(x[row : row + 1], weight, 1e-5, mate, unit)
        assert_same_bits(single, normed[row : row + 1])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(200) is infinite, and right
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("size", [60, 1536])
def test_silu_and_mul(size: int, gelu: bool, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * size).mul(4).to(dtype)
    got = silu_and_mul(x, gelu)
    assert_rounds_alike(got, reference_silu_and_mul(x, gelu))
    assert_same_bits(silu_and_mul(x[1:2], gelu), got[1:2])
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], dtype=dtype)
    assert silu_and_mul(extreme, gelu).tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embedding_stays_in_its_table(ids_dtype: torch.dtype) -> None:
    table = torch.randn(11, 1100).to(torch.bfloat16)
    ids = torch.tensor([0, 10, 3, 3, -1, 11, 2**31 - 1], dtype=ids_dtype)
    got = embed(ids, table)
    assert_same_bits(got, table[[0, 10, 3, 3, 0, 10, 10]])


def rope_operands(
    shape: tuple[int, int, int, bool], dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """Seven tokens over four blocks of 4 slots; the last two are padding with wild positions."""
    heads, kv_heads, head_dim, qk_norm = shape
    qkv = torch.randn(7, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.outer(torch.arange(50.0), torch.logspace(0, -3, head_dim // 2))
    positions = torch.tensor([0, 1, 49, 17, 3, 10**6, -5])
    slots = torch.tensor([9, 4, 0, 15, 8, -1, -1])
    norms = (torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype))
    given = (qkv, angles.cos(), angles.sin(), positions, slots)
    return given, (norms if qk_norm else (None, None))


def assert_rotated_alike(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 4 ulps of the head's largest: a rounding that the norm flipped is rotated along."""
    scale = expected.float().abs().amax(-1, keepdim=True)
    error = (got.float() - expected.float()).abs()
    assert bool((error <= 4 * torch.finfo(got.dtype).eps * scale).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit", [False, True], ids=["weight", "1+weight"])
@pytest.mark.parametrize("shape", [SMOLLM2, QWEN3, (2, 1, 96, True)], ids=str)
def test_rope_and_cache(shape: tuple[int, int, int, bool], unit: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, _ = shape
    given, norms = rope_operands(shape, dtype)
    qkv, cos, sin, positions, slots = given
    untouched = 77.0
    cache = torch.full((4, 2, kv_heads, 4, head_dim), untouched, dtype=dtype)
    expected_cache = cache.clone()
    unit_offset = {"unit_offset": unit}
    expected = rope_and_cache_by_layers(
        *given, expected_cache, heads, kv_heads, *norms, 1e-6, **unit_offset
    )
    query = rope_and_cache(*given, cache, heads, kv_heads, *norms, 1e-6, **unit_offset)
    assert_rotated_alike(query, expected)
    assert_rotated_alike(cache[:, 0], expected_cache[:, 0])
    assert_same_bits(cache[:, 1], expected_cache[:, 1])
    assert int((cache != untouched).sum()) == 5 * 2 * kv_heads * head_dim
    assert torch.equal(cache == untouched, expected_cache == untouched)

    again = torch.full_like(cache, untouched)
    for row in range(7):
        one = slice(row, row + 1)
        single = rope_and_cache(
            qkv[one], cos, sin, positions[one].int(), slots[one], again, heads, kv_heads,
            *norms, 1e-6, unit,
        )  # fmt: skip
        assert_same_bits(single, query[one])
    assert_same_bits(again, cache)


@pytest.mark.parametrize("shape", [SMOLLM2, QWEN3], ids=str)
def test_values_that_are_not_finite_are_held_by_their_keys(
    shape: tuple[int, int, int, bool],
) -> None:
    """See contain_values: one head of one token, by NaN or infinity, and no other head."""
    heads, kv_heads, head_dim, _ = shape
    given, norms = rope_operands(shape, torch.bfloat16)
    values = given[0].view(7, -1, head_dim)[:, heads + kv_heads :]
    values[1, 0, 3], values[3, kv_heads - 1, head_dim - 1] = torch.nan, -torch.inf
    cache = torch.zeros(4, 2, kv_heads, 4, head_dim, dtype=torch.bfloat16)
    expected = cache.clone()
    rope_and_cache_by_layers(*given, expected, heads, kv_heads, *norms, 1e-6)
    rope_and_cache(*given, cache, heads, kv_heads, *norms, 1e-6)
    assert torch.equal(cache.isnan(), expected.isnan())
    assert int(cache.isnan().sum()) == 2 * head_dim
    assert_same_bits(cache[:, 1], expected[:, 1])
    assert cache[:, 1].isfinite().all()


def test_rope_leaves_what_lies_between_strided_blocks() -> None:
    """Blocks of all layers may lie side by side: only the range of this layer is written."""
    given, _ = rope_operands(SMOLLM2, torch.float32)
    whole = torch.zeros(4, 3, 2, 3, 4, 64)
    rope_and_cache(*given, whole[:, 1], 9, 3)
    plain = torch.zeros(4, 2, 3, 4, 64)
    rope_and_cache(*given, plain, 9, 3)
    assert_same_bits(whole[:, 1], plain)
    assert not whole[:, ::2].any()


@pytest.mark.parametrize("tile", [SMALL, MEDIUM, Tile(16, 16, 32, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_linear(tile: Tile, dtype: torch.dtype) -> None:
    for rows, n, k in ((1, 40, 136), (17, 72, 64), (67, 24, 8)):
        x, weight = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
        bias = torch.randn(n).to(dtype)
        for b in (None, bias):
            got = linear_by_tile(x, weight, b, tile)
            exact = x.double() @ weight.double().t() + (0 if b is None else b.double())
            slack = torch.finfo(dtype).eps * exact.abs() + 1e-4
            assert bool(((got.double() - exact).abs() <= slack).all())


def test_linear_keeps_a_nan_in_its_row() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    x[4] = torch.nan
    got = fixed_linear(x, weight)
    assert bool(torch.isfinite(got[:4]).all())
    assert bool(torch.isnan(got[4]).all())


def test_tiles_follow_the_size() -> None:
    assert {choose_tile(rows, 4096) for rows in range(1, 17)} == {SMALL}
    assert {choose_tile(rows, 151_936) for rows in range(17, 65)} == {MEDIUM}
    assert choose_tile(128, 4096) == MEDIUM  # 32 large tiles would leave most SMs idle
    assert choose_tile(128, 24_576) == LARGE
    assert choose_tile(8192, 4096) == LARGE
    assert {SMALL, MEDIUM, LARGE} == set(TILES)


def test_no_rows() -> None:
    none = torch.empty(0, 64, dtype=torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    normed, residual = rms_norm(none, weight, 1e-5, none)
    assert normed.shape == residual.shape == (0, 64)
    assert silu_and_mul(none).shape == (0, 32)
    assert embed(torch.empty(0, dtype=torch.int64), weight[None]).shape == (0, 64)
    assert fixed_linear(none, weight.expand(8, 64).contiguous()).shape == (0, 8)
    cache = torch.zeros(1, 2, 1, 4, 16, dtype=torch.bfloat16)
    index = torch.empty(0, dtype=torch.int64)
    table = torch.ones(1, 8)
    assert rope_and_cache(none, table, table, index, index, cache, 2, 1).shape == (0, 2, 16)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    with pytest.raises(KernelError, match="bf16 or fp16"):
        fixed_linear(x.float(), weight.float())
    with pytest.raises(KernelError, match="contiguous"):
        fixed_linear(x[:, :32], weight[:, :32])
    with pytest.raises(KernelError, match="multiply"):
        fixed_linear(x, weight[:9])
    with pytest.raises(KernelError, match="contiguous"):
        rms_norm(x[:, :32], weight[0, :32], 1e-5)
    with pytest.raises(KernelError, match="contiguous"):
        silu_and_mul(x[:, :32])
    with pytest.raises(KernelError, match="contiguous"):
        embed(torch.tensor([1]), weight[:, :32])
    cache = torch.zeros(1, 2, 1, 4, 16, dtype=torch.bfloat16)
    index, table = torch.zeros(4, dtype=torch.int64), torch.ones(1, 8)
    with pytest.raises(KernelError, match="qkv"):
        rope_and_cache(x, table, table, index, index, cache, 3, 1)
    transposed = torch.zeros(1, 2, 4, 2, 16, dtype=torch.bfloat16).transpose(2, 3)
    with pytest.raises(KernelError, match="one contiguous range"):
        rope_and_cache(x, table, table, index, index, transposed, 0, 2)
    with pytest.raises(KernelError, match="together"):
        rope_and_cache(x, table, table, index, index, cache, 2, 1, table[0])
