"""The small fused ops on the GPU: right on real shapes, and no row's bits depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.cpu.layers.fused import rope_and_cache_by_layers

from octavo.kernels.triton.activation import reference_silu_and_mul, silu_and_mul
from octavo.kernels.triton.embedding import embed
from octavo.kernels.triton.linear import TILES, choose_tile, fixed_linear, linear_by_tile
from octavo.kernels.triton.norm import reference_rms_norm, rms_norm
from octavo.kernels.triton.rope_cache import rope_and_cache

ROWS = 300
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
HIDDEN = [576, 1024, 4096, 5120, 16_384]
# heads, kv_heads, head_dim, QK-norm: SmolLM2-135M, Llama-3-8B, Qwen3-0.6B, Qwen3-8B
HEADS = [(9, 3, 64, False), (32, 8, 128, False), (16, 8, 128, True), (32, 8, 128, True)]
Op = Callable[[torch.Tensor], torch.Tensor]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """torch.empty gives NaN inside: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(1000, device="cuda").isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.int16), expected.view(torch.int16))


def assert_rounds_alike(got: torch.Tensor, expected: torch.Tensor, ulps: int = 1) -> None:
    """Within `ulps` of the dtype everywhere and equal nearly everywhere; NaN is never right."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    error = (got.double() - expected.double()).abs()
    limit = ulps * torch.finfo(got.dtype).eps * expected.double().abs() + 1e-6
    assert bool((error <= limit).all())
    assert float((got != expected).double().mean()) <= 0.02


def assert_rows_stand_alone(op: Op, x: torch.Tensor) -> None:
    """op of any number of x's rows, in any order, beside NaN: always the bits of the whole."""
    with fresh_memory_is_nan():
        whole = op(x)
        assert bool(torch.isfinite(whole).all())
        for count in range(1, x.shape[0] + 1):
            assert same_bits(op(x[-count:]), whole[-count:]), count
        order = torch.randperm(x.shape[0], device="cuda")
        assert same_bits(op(x[order]), whole[order])
        if x.is_floating_point():
            poisoned = x.clone()
            poisoned[::3] = torch.nan
            got = op(poisoned)
            assert same_bits(got[1::3], whole[1::3])
            assert same_bits(got[2::3], whole[2::3])
            assert bool(torch.isnan(got[::3]).all())


@DTYPES
@pytest.mark.parametrize(
    ("hidden", "unit"), [*((n, False) for n in HIDDEN), (640, True), (5376, True)]
)
def test_rms_norm(hidden: int, unit: bool, dtype: torch.dtype) -> None:
    weight = random(hidden, dtype=dtype, seed=1)
    x, residual = random(ROWS, hidden, dtype=dtype), random(ROWS, hidden, dtype=dtype)
    expected, summed = reference_rms_norm(x, weight, 1e-6, residual, unit)
    normed, returned = rms_norm(x, weight, 1e-6, residual, unit)
    assert returned is residual
    assert same_bits(residual, summed)
    assert_rounds_alike(normed, expected, ulps=2)
    assert same_bits(rms_norm(summed, weight, 1e-6, None, unit)[0], normed)
    x = random(ROWS, hidden, dtype=dtype, seed=2)
    assert_rows_stand_alone(lambda rows: rms_norm(rows, weight, 1e-6, None, unit)[0], x)
    assert_rows_stand_alone(lambda rows: rms_norm(rows, weight, 1e-6, rows.clone(), unit)[0], x)


@pytest.mark.parametrize("size", [1536, 3072, 12_288, 25_600])
def test_silu_and_mul(size: int) -> None:
    x = random(ROWS, 2 * size) * 4
    assert_rounds_alike(silu_and_mul(x), reference_silu_and_mul(x))
    assert_rows_stand_alone(silu_and_mul, x)
    extreme = torch.tensor([[-200.0, 200.0, -1.0, 1.0] + [1.0] * 4], dtype=BF16, device="cuda")
    assert silu_and_mul(extreme).tolist() == [[0.0, 200.0, -0.26953125, 0.73046875]]


def test_silu_and_mul_of_fp16_rows() -> None:
    x = random(ROWS, 2 * 3072, dtype=FP16) * 4
    assert_rounds_alike(silu_and_mul(x), reference_silu_and_mul(x))
    assert_rows_stand_alone(silu_and_mul, x)


@pytest.mark.parametrize("size", [2048, 10_240])
def test_gelu_and_mul(size: int) -> None:
    x = random(ROWS, 2 * size) * 4
    assert_rounds_alike(silu_and_mul(x, gelu=True), reference_silu_and_mul(x, gelu=True))
    assert_rows_stand_alone(lambda rows: silu_and_mul(rows, gelu=True), x)
    extreme = torch.tensor([[-200.0, 200.0, -1.0, 1.0] + [1.0] * 4], dtype=BF16, device="cuda")
    gate = extreme[0, :4].float().cpu()
    expected = torch.nn.functional.gelu(gate, approximate="tanh").to(BF16).tolist()
    assert silu_and_mul(extreme, gelu=True)[0].tolist() == expected


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embedding(ids_dtype: torch.dtype) -> None:
    table = random(151_936, 1024)
    ids = torch.randint(0, 151_936, (ROWS,), device="cuda", dtype=ids_dtype)
    ids[:6] = torch.tensor([0, 151_935, 151_936, -1, 2**31 - 1, -(2**31)])
    assert same_bits(embed(ids, table), table[ids.long().clamp(0, 151_935)])
    assert_rows_stand_alone(lambda some: embed(some, table), ids)


def rope_tables(head_dim: int, positions: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.logspace(0, -5, head_dim // 2, device="cuda")
    angles = torch.outer(torch.arange(positions, device="cuda").float(), scale)
    return angles.cos(), angles.sin()


@DTYPES
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rope_and_cache(shape: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, qk_norm = shape
    cos, sin = rope_tables(head_dim)
    qkv = random(ROWS, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions = torch.randint(0, 4096, (ROWS,), device="cuda")
    slots = torch.randperm(64 * 16, device="cuda")[:ROWS]
    slots[7::50] = -1
    positions[7::50] = 10**9
    norms: list[torch.Tensor | None] = [None, None]
    if qk_norm:
        norms = [random(head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    untouched = 77.0
    cache = torch.full((64, 2, kv_heads, 16, head_dim), untouched, dtype=dtype, device="cuda")
    expected_cache = cache.clone()
    tail = (heads, kv_heads, *norms, 1e-6)
    expected = rope_and_cache_by_layers(qkv, cos, sin, positions, slots, expected_cache, *tail)
    with fresh_memory_is_nan():
        query = rope_and_cache(qkv, cos, sin, positions, slots, cache, *tail)
    for got, right in ((query, expected), (cache[:, 0], expected_cache[:, 0])):
        scale = right.float().abs().amax(-1, keepdim=True)
        limit = (
            4 * torch.finfo(dtype).eps * scale
        )  # a rounding flipped by the norm is rotated along
        assert bool(((got.float() - right.float()).abs() <= limit).all())
    assert same_bits(cache[:, 1], expected_cache[:, 1])
    assert torch.equal(cache == untouched, expected_cache == untouched)

    for count in range(1, ROWS + 1):
        again = torch.full_like(cache, untouched)
        part = slice(ROWS - count, ROWS)
        got = rope_and_cache(
            qkv[part], cos, sin, positions[part].int(), slots[part], again, *tail
        )  # fmt: skip
        assert same_bits(got, query[part]), count
        real = slots[part][slots[part] >= 0]
        block, offset = real // 16, real % 16
        assert same_bits(again[block, :, :, offset], cache[block, :, :, offset]), count
    qkv[7::50] = torch.nan
    again = torch.full_like(cache, untouched)
    rope_and_cache(qkv, cos, sin, positions, slots, again, *tail)
    assert same_bits(again, cache)


def test_cache_writes_beyond_31_bits() -> None:
    heads, kv_heads, head_dim, _ = HEADS[1]
    cos, sin = rope_tables(head_dim)
    qkv = random(2, (heads + 2 * kv_heads) * head_dim)
    positions = torch.tensor([5, 6], device="cuda")
    cache = torch.zeros(70_000, 2, kv_heads, 16, head_dim, dtype=BF16, device="cuda")
    small = torch.zeros(2, 2, kv_heads, 16, head_dim, dtype=BF16, device="cuda")
    assert cache.numel() > 2**31
    slots = torch.tensor([69_999 * 16 + 3, 33_000 * 16 + 15], device="cuda")
    rope_and_cache(qkv, cos, sin, positions, slots, cache, heads, kv_heads)
    slots = torch.tensor([1 * 16 + 3, 0 * 16 + 15], device="cuda")
    rope_and_cache(qkv, cos, sin, positions, slots, small, heads, kv_heads)
    assert same_bits(cache[[33_000, 69_999]], small)
    written = torch.cat([(part != 0).flatten(1).any(1) for part in cache.split(10_000)])
    assert written.nonzero().flatten().tolist() == [33_000, 69_999]


@pytest.mark.parametrize(
    "shape", [(8, 8), (24, 40), (136, 264), (1000, 1544), (4096, 4096)], ids=str
)
def test_linear_against_float64(shape: tuple[int, int]) -> None:
    n, k = shape
    for dtype in (BF16, FP16) if shape == (136, 264) else (BF16,):
        weight, bias = random(n, k, dtype=dtype), random(n, dtype=dtype, seed=1)
        for rows in (1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 130):
            x = random(rows, k, dtype=dtype, seed=rows)
            exact = x.double() @ weight.double().t()
            size = x.double().abs() @ weight.double().abs().t()
            for b, right in ((None, exact), (bias, exact + bias.double())):
                with fresh_memory_is_nan():
                    got = fixed_linear(x, weight, b)
                limit = 0.501 * torch.finfo(dtype).eps * right.abs() + 2**-18 * size + 1e-6
                assert bool(((got.double() - right).abs() <= limit).all()), (rows, dtype)


@DTYPES
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", [(136, 264), (576, 1544), (1024, 3072), (4096, 4096)], ids=str)
def test_tiles_give_the_same_bits(shape: tuple[int, int], wide: bool, dtype: torch.dtype) -> None:
    n, k = shape
    # So small that no sum of wide data is beyond what fp16 holds.
    weight, bias = random(n, k, dtype=dtype) / 64, random(n, dtype=dtype, seed=1)
    for rows in (1, 16, 17, 64, 65, 130, 300):
        x = random(rows, k, dtype=dtype, seed=rows)
        if wide:  # 24 binades: sums whose low bits depend on any change of order
            x = x * torch.exp2(torch.randint(-12, 12, x.shape, device="cuda").float()).to(dtype)
        for b in (None, bias):
            first, *others = (linear_by_tile(x, weight, b, tile) for tile in TILES)
            assert bool(torch.isfinite(first).all())
            for tile, other in zip(TILES[1:], others, strict=True):
                assert same_bits(other, first), (rows, tile)


@DTYPES
@pytest.mark.parametrize("shape", [(1032, 1096), (24_576, 1024)], ids=str)
def test_linear_rows_stand_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = shape
    if n > 20_000:
        assert {choose_tile(rows, n) for rows in range(1, ROWS + 1)} == set(TILES)
    weight, x = random(n, k, dtype=dtype), random(ROWS, k, dtype=dtype, seed=1)
    assert_rows_stand_alone(lambda rows: fixed_linear(rows, weight), x)


def test_linear_offsets_beyond_31_bits() -> None:
    x, weight = random(15_000, 8), random(151_936, 8, seed=1)
    got = fixed_linear(x, weight)
    assert got.numel() > 2**31
    right = x[-40:].double() @ weight.double().t()
    assert bool(((got[-40:].double() - right).abs() <= 2**-8 * right.abs() + 1e-5).all())
    del got
    wide = random(270_000, 8192, seed=2)
    assert wide.numel() > 2**31
    x = random(20, 8192)
    for rows in (1, 20):
        right = x[:rows].double() @ wide[-64:].double().t()
        got = fixed_linear(x[:rows], wide)[:, -64:]
        assert bool(((got.double() - right).abs() <= 2**-8 * right.abs() + 0.05).all())


def test_graph_replay_reads_fresh_inputs() -> None:
    heads, kv_heads, head_dim, _ = HEADS[3]
    table, gate_up, scale = random(1000, 1024), random(6144, 1024), random(1024)
    qkv_weight, norm = random(48 * head_dim, 1024, seed=1) * 0.03, random(head_dim, seed=2)
    cos, sin = rope_tables(head_dim)
    ids, positions, slots = (torch.zeros(8, dtype=torch.int64, device="cuda") for _ in range(3))
    cache = torch.zeros(4, 2, kv_heads, 16, head_dim, dtype=BF16, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        x = embed(ids, table)
        normed, residual = rms_norm(x, scale, 1e-6)
        qkv = fixed_linear(normed, qkv_weight)
        query = rope_and_cache(
            qkv, cos, sin, positions, slots, cache, heads, kv_heads, norm, norm, 1e-6
        )
        normed, _ = rms_norm(normed, scale, 1e-6, residual)
        return query, silu_and_mul(fixed_linear(normed, gate_up))

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        ids.random_(0, 1000, generator=generator)
        positions.random_(0, 4096, generator=generator)
        slots.copy_(torch.randperm(64, device="cuda", generator=generator)[:8])
        cache.zero_()
        graph.replay()
        replayed = [part.clone() for part in (*captured, cache)]
        cache.zero_()
        for got, right in zip(replayed, (*step(), cache), strict=True):
            assert same_bits(got, right)
        assert int(cache.count_nonzero()) > 0
