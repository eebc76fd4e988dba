"""The CPU's own kernels: against torch, row by row the same bits, and what happens without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cpu.paged import assert_close, assert_same_bits

from octavo.attention.native import NativeAttention, make_cpu_attention
from octavo.attention.reference import ReferenceAttention
from octavo.config.kv_cache import KVCacheSpec
from octavo.config.rope import RopeConfig
from octavo.kernels.cpu import native
from octavo.kernels.cpu.native import CpuKernels, HeadShape, cpu_kernels
from octavo.layers.activation import silu_and_mul
from octavo.layers.linear import AmxLinear, TiledLinear, cpu_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def kernels(dtype: torch.dtype) -> CpuKernels:
    found = cpu_kernels(dtype)
    assert found is not None, "no C compiler here"
    return found


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty disk cache and nothing loaded; the process's own kernels come back after."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    cpu_kernels.cache_clear()
    yield tmp_path / "kernels"
    cpu_kernels.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_with_norms_equals_torch(dtype: torch.dtype) -> None:
    """q and k against the layers of the torch path; v unchanged; the cache as laid out."""
    heads, kv_heads, dim, size, tokens = 6, 2, 64, 16, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    rotary = RotaryEmbedding(RopeConfig(1e4), dim, 100, CPU)
    tables = rotary.tables(torch.arange(40, 40 + tokens))
    norm = RMSNorm(dim, 1e-5, dtype, CPU)
    norm.weight.data.uniform_(0.5, 1.5)
    slots = torch.tensor([16 + 15, 32, 33, -1, 16])
    before = qkv.view(tokens, -1, dim).clone()
    cache = torch.zeros(3, 2, kv_heads, size * dim, dtype=dtype)
    shape = HeadShape(heads, kv_heads, dim, size)
    kernels(dtype).rotate_and_write(
        qkv, tables, (norm.weight, norm.weight), 1e-5, False, slots, cache, shape
    )
    after = qkv.view(tokens, -1, dim)
    both = heads + kv_heads
    expected = rotary(norm(before[:, :both])[0], tables)
    assert_close(after[:, :both], expected, 1e-5 if dtype == torch.float32 else 0.04)
    assert_same_bits(after[:, both:], before[:, both:])
    keys = cache[:, 0].view(3, kv_heads, dim, size)
    values = cache[:, 1].view(3, kv_heads, size, dim)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, size)
            assert_same_bits(keys[block, :, :, offset], after[token, heads:both])
            assert_same_bits(values[block, :, offset], after[token, both:])
    assert (cache[0] == 0).all()


@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
def test_exp_is_as_good_as_torchs(gelu: bool) -> None:
    """fp32 activations within four units of the last place; gelu's logit is itself a rounded cube."""
    x = torch.cat((torch.linspace(-90, 90, 6400).view(-1, 32), torch.ones(200, 32)), 1)
    wide = x[:, :32].double()
    logit = (0.044715 * wide**3 + wide) * 1.5957691216057308 if gelu else wide
    expected = wide * torch.sigmoid(logit)
    got = silu_and_mul(x, gelu).double()
    error = (got - expected).abs() / expected.abs().clamp(min=1e-30)
    assert error[expected.abs() > 1e-30].max() < (4 + 200 * gelu) * 2**-24


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(48, 32), (960, 576), (576, 1536), (16, 4096)])
def test_amx_rows_have_the_bits_that_they_have_alone(shape: tuple[int, int], bias: bool) -> None:
    """Any number of rows from any offset; more rows than a band; right against double."""
    weight = torch.randn(shape).bfloat16()
    term = torch.randn(shape[0]).bfloat16() if bias else None
    linear = cpu_linear(weight, term)
    if not kernels(torch.bfloat16).has_amx:
        assert isinstance(linear, TiledLinear)
        pytest.skip("this processor has no AMX")
    assert isinstance(linear, AmxLinear)
    x = torch.randn(700, shape[1]).bfloat16()
    out = linear(x)
    exact = x.double() @ weight.double().T + (0 if term is None else term.double())
    assert_close(out, exact, 2.0**-8 * exact.abs().max().item())
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 64, 129, 500):
        for offset in (0, 5, 700 - rows):
            part = slice(offset, offset + rows)
            assert_same_bits(linear(x[part]), out[part])
    assert linear(x[:0]).shape == (0, shape[0])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same_bits(linear(x), out)
    finally:
        torch.set_num_threads(before)


def test_other_widths_are_left_to_torch() -> None:
    assert isinstance(cpu_linear(torch.randn(40, 64).bfloat16(), None), TiledLinear)
    assert isinstance(cpu_linear(torch.randn(48, 48).bfloat16(), None), TiledLinear)
    assert isinstance(cpu_linear(torch.randn(48, 64), None), TiledLinear)


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (32, 96), (8, 64), (16, 80)])
def test_attention_backend_by_shape(block_size: int, head_dim: int) -> None:
    spec = KVCacheSpec(block_size, 2, head_dim, 4)
    backend = make_cpu_attention(4, spec, torch.float32)
    fits = block_size % 16 == 0 and head_dim % 32 == 0
    assert isinstance(backend, NativeAttention if fits else ReferenceAttention)
    half = make_cpu_attention(4, KVCacheSpec(16, 2, 64, 2), torch.float16)
    assert isinstance(half, ReferenceAttention)


def test_without_a_compiler_torch_serves(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cpu_kernels(torch.bfloat16) is None
    assert isinstance(cpu_linear(torch.randn(48, 32).bfloat16(), None), TiledLinear)
    spec = KVCacheSpec(16, 2, 64, 4)
    assert isinstance(make_cpu_attention(4, spec, torch.float32), ReferenceAttention)
    assert silu_and_mul(torch.ones(2, 64)).shape == (2, 32)


def test_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")
    assert cpu_kernels(torch.float32) is None
    assert not fresh.exists()


def test_a_compiler_that_fails_is_a_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_COMPILE", (*native._COMPILE, "-fno-such-option"))
    assert cpu_kernels(torch.float32) is None
    assert "no-such-option" in caplog.text
    assert list(fresh.iterdir()) == []


def test_a_library_that_cannot_be_loaded_is_removed(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it costs its speed to one start only."""

    def compile_badly(compiler: str, flags: tuple[str, ...], path: Path) -> None:
        path.parent.mkdir()
        path.write_text("no library")

    monkeypatch.setattr(native, "_compile", compile_badly)
    assert cpu_kernels(torch.float32) is None
    assert list(fresh.iterdir()) == []


def test_compiled_once(fresh: Path) -> None:
    assert cpu_kernels(torch.float32) is not None
    [library] = fresh.iterdir()
    made = library.stat().st_mtime_ns
    cpu_kernels.cache_clear()
    assert cpu_kernels(torch.float32) is not None
    assert library.stat().st_mtime_ns == made
