"""The CPU's own kernels: against torch, row by row the same bits, and what happens without them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.cpu import native_ops
from tests.cpu.models.helpers import load, reference
from tests.cpu.native_ops import PagedAttention, kernels, needs_kernels
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits, common_metadata, settings
from tests.cpu.weights.helpers import save_gguf, weights

from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.config.engine import EngineArgs
from octavo.config.kv_cache import KVCacheSpec
from octavo.config.rope import RopeConfig
from octavo.errors import ConfigError
from octavo.kernels.cpu import native
from octavo.kernels.cpu.native import cpu_kernels
from octavo.kernels.triton.activation import reference_silu_and_mul
from octavo.kernels.triton.norm import reference_rms_norm
from octavo.layers.linear import Linear, NativeLinear, TiledLinear, cpu_linear
from octavo.layers.rotary import RotaryEmbedding
from octavo.weights.checkpoint import load_model_config

pytestmark = needs_kernels

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(48, 32), (960, 576), (576, 1536), (16, 4096)]


def ulp(dtype: torch.dtype) -> float:
    """A step of bf16, and four of fp32, of a number just above a power of two."""
    return 2.0**-7 if dtype == torch.bfloat16 else 2.0**-21


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty disk cache and nothing loaded; the process's own kernels come back after."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    cpu_kernels.cache_clear()
    yield tmp_path / "cache" / "kernels"
    cpu_kernels.cache_clear()


@pytest.fixture(params=["amx", "vectors"])
def linear_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With AMX, and compiled as on a machine without it."""
    cpu_kernels.cache_clear()
    if request.param == "vectors":
        flags = (*native._COMPILE, "-mno-amx-bf16", "-mno-avx512bf16")
        monkeypatch.setattr(native, "_COMPILE", flags)
        assert not kernels(torch.bfloat16).has_amx
    elif not kernels(torch.bfloat16).has_amx:
        pytest.skip("this processor has no AMX")
    yield
    cpu_kernels.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit", [False, True], ids=["weight", "unit_offset"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
def test_norm_equals_torch(dtype: torch.dtype, unit: bool, with_residual: bool) -> None:
    """Also: a row has its bits whatever rows and threads are beside it."""
    x, other = torch.randn(2, 90, 576).to(dtype)
    residual = other if with_residual else None
    weight = torch.empty(576).uniform_(-1.5, 1.5).to(dtype)
    got, total = native_ops.rms_norm(x, weight, 1e-5, residual, unit)
    expected, expected_total = reference_rms_norm(x, weight, 1e-5, residual, unit)
    assert_close(got, expected, ulp(dtype) * expected.abs().max().item())
    assert_same_bits(total, expected_total)
    for part in (slice(0, 1), slice(7, 90)):
        mates = None if residual is None else residual[part]
        alone, _ = native_ops.rms_norm(x[part], weight, 1e-5, mates, unit, threads=3)
        assert_same_bits(alone, got[part])


@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
def test_activation_equals_torch(gelu: bool) -> None:
    """fp32 within four units of the last place (gelu's logit is itself a rounded cube); bf16 rows."""
    x = torch.cat((torch.linspace(-90, 90, 6400).view(-1, 32), torch.ones(200, 32)), 1)
    wide = x[:, :32].double()
    logit = (0.044715 * wide**3 + wide) * 1.5957691216057308 if gelu else wide
    expected = wide * torch.sigmoid(logit)
    error = (native_ops.silu_and_mul(x, gelu).double() - expected).abs()
    error /= expected.abs().clamp(min=1e-30)
    assert error[expected.abs() > 1e-30].max() < (4 + 200 * gelu) * 2**-24
    x = torch.randn(70, 2 * 1536).bfloat16()
    got = native_ops.silu_and_mul(x, gelu)
    expected = reference_silu_and_mul(x, gelu)
    assert_close(got, expected, ulp(x.dtype) * expected.abs().max().item())
    assert_same_bits(native_ops.silu_and_mul(x[5:9], gelu, threads=3), got[5:9])


@pytest.mark.parametrize("unit", [False, True], ids=["weight", "unit_offset"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_with_norms_equals_torch(dtype: torch.dtype, unit: bool) -> None:
    """q and k against the layers of the torch path; v unchanged; the cache as laid out."""
    heads, kv_heads, dim, size, tokens = 6, 2, 64, 16, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    rotary = RotaryEmbedding(RopeConfig(1e4), dim, 100, CPU)
    tables = rotary.tables(torch.arange(40, 40 + tokens))
    weight = torch.empty(dim).uniform_(0.5, 1.5).to(dtype)
    attention = PagedAttention(heads, KVCacheSpec(size, kv_heads, dim, dtype.itemsize), dtype)
    common = common_metadata([tokens], [tokens], [[1]], size)
    common.slot_mapping.copy_(torch.tensor([16 + 15, 32, 33, -1, 16]))
    before = qkv.view(tokens, -1, dim).clone()
    cache = torch.zeros(attention.kv_cache_shape(3, attention.spec), dtype=dtype)
    attention.write(qkv, tables, cache, common, (weight, weight), 1e-5, unit)
    after = qkv.view(tokens, -1, dim)
    both = heads + kv_heads
    normed = reference_rms_norm(before[:, :both], weight, 1e-5, None, unit)[0]
    assert_close(after[:, :both], rotary(normed, tables), 1e-5 if dtype == torch.float32 else 0.05)
    assert_same_bits(after[:, both:], before[:, both:])
    keys = cache[:, 0].view(3, kv_heads, dim, size)
    values = cache[:, 1].view(3, kv_heads, size, dim)
    for token, slot in enumerate(common.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, size)
            assert_same_bits(keys[block, :, :, offset], after[token, heads:both])
            assert_same_bits(values[block, :, offset], after[token, both:])
    assert (cache[0] == 0).all()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_bits_that_they_have_alone(
    linear_kind: None, dtype: torch.dtype, bias: bool
) -> None:
    """Any number of rows from any offset; more rows than a band; 3 threads; right against double; a
    NaN stays in its row."""
    for shape in SHAPES:
        weight = torch.randn(shape).to(dtype)
        term = torch.randn(shape[0]).to(dtype) if bias else None
        linear = cpu_linear(weight, term)
        assert isinstance(linear, NativeLinear)
        x = torch.randn(300, shape[1]).to(dtype)
        out = linear(x)
        exact = x.double() @ weight.double().T + (0 if term is None else term.double())
        bound = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
        assert_close(out, exact, bound * exact.abs().max().item())
        for rows in (1, 2, 5, 16, 17, 31, 32, 33, 129):
            for offset in (0, 5, 300 - rows):
                part = slice(offset, offset + rows)
                assert_same_bits(linear(x[part]), out[part])
        assert linear(x[:0]).shape == (0, shape[0])
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            assert_same_bits(linear(x), out)
        finally:
            torch.set_num_threads(before)
        x[3, 7] = torch.nan
        assert linear(x)[3].isnan().all()
        assert_same_bits(linear(x)[4:], out[4:])
        assert_same_bits(linear(x)[:3], out[:3])


def stored(kind: str, columns: int, depth: int) -> torch.Tensor:
    """Random rows of blocks; scales and least values up to 4, some zero, negative or subnormal."""
    size = native.BLOCK_KINDS[kind][1]
    rows = torch.randint(0, 256, (columns, depth // 32, size), dtype=torch.uint8)
    heads = torch.empty(columns, depth // 32, 2).uniform_(-4, 4).half()
    heads[1::5], heads[2::5, :, 0], heads[3::5, :, 1] = 6e-8, 0, 0
    head = 4 if kind == "Q4_1" else 2
    rows[..., :head] = heads.view(torch.uint8)[..., :head]
    return rows.view(columns, -1)


def values(kind: str, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By the gguf package, in fp32, then rounded."""
    with np.errstate(all="ignore"):
        found = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(found).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", native.BLOCK_KINDS)
def test_blocks_have_the_bits_of_their_values(
    linear_kind: None, kind: str, dtype: torch.dtype
) -> None:
    """For any number of rows, more than a band, too; one panel, an odd number of them; 3 threads."""
    for columns, depth in ((16, 32), (48, 96), (96, 1536)):
        rows = stored(kind, columns, depth)
        weight, bias = values(kind, rows, dtype), torch.randn(columns).to(dtype)
        expected = NativeLinear(kernels(dtype), weight, bias)
        packed = NativeLinear(kernels(dtype), rows, bias, kind)
        assert packed.matrix.kind
        x = torch.randn(700, depth).to(dtype)
        out = expected(x)
        for count in (0, 1, 2, 15, 16, 17, 31, 32, 33, 100, 700):
            assert_same_bits(packed(x[:count]), out[:count])
            assert_same_bits(packed(x[700 - count :]), out[700 - count :])
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            assert_same_bits(packed(x), out)
            assert_same_bits(packed(x[:20]), out[:20])
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("kind", native.BLOCK_KINDS)
def test_a_scale_that_is_not_finite_stays_in_its_output(linear_kind: None, kind: str) -> None:
    for scale in (torch.inf, torch.nan):
        rows = stored(kind, 48, 64)
        rows[7, :2] = torch.tensor([scale]).half().view(torch.uint8)
        weight = values(kind, rows, torch.bfloat16)
        x = torch.randn(3, 64).bfloat16()
        out = NativeLinear(kernels(torch.bfloat16), rows, None, kind)(x)
        expected = NativeLinear(kernels(torch.bfloat16), weight, None)(x)
        assert out[:, 7].isnan().all() or scale == torch.inf
        assert torch.equal(out.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert_same_bits(out[numbers], expected[numbers])
        assert_same_bits(out[:, torch.arange(48) != 7], expected[:, torch.arange(48) != 7])


def test_what_the_kernels_do_not_take_stays_elements() -> None:
    for rows, columns, dtype, kind in (
        (48, 64, torch.bfloat16, "Q4_K"),
        (40, 64, torch.bfloat16, "Q8_0"),
        (48, 48, torch.bfloat16, "Q8_0"),
        (48, 64, torch.float16, "Q8_0"),
        (48, 64, torch.bfloat16, "Q8_0"),
    ):
        linear = Linear(columns, (rows,), dtype, CPU)
        kept = linear.keep_blocks(kind)
        assert linear.weight is not None
        if (rows, columns, dtype, kind) != (48, 64, torch.bfloat16, "Q8_0"):
            assert not kept
            assert linear.weight.shape == (rows, columns)
            continue
        assert kept == 68
        linear.weight.data.copy_(stored(kind, rows, columns))
        linear.finalize("tiled")
        assert isinstance(linear.kernel, NativeLinear)
        assert (linear.kernel.matrix.columns, linear.kernel.matrix.depth) == (rows, columns)


def test_parts_of_two_types_are_kept_as_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q and v in Q4_0, k in Q8_0: the same bits as if nothing were kept in blocks."""
    plain = gguf.GGUFWriter.add_tensor
    q4, q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0

    def mixed(writer: gguf.GGUFWriter, name: str, data: Any, raw_dtype: Any = None) -> None:
        if ".attn_k." in name:
            data, raw_dtype = gguf.quantize(gguf.dequantize(data, q4), q8), q8
        plain(writer, name, data, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", mixed)
    config = settings(vocab_size=144)
    save_gguf(tmp_path / "m.gguf", config, weights(config), q4)
    ours = load_model_config(EngineArgs(str(tmp_path / "m.gguf")))
    model, tokens = PagedModel(ours), torch.arange(3, 40)
    kinds = {
        name.rpartition(".")[2]: module.kernel.matrix.kind
        for name, module in model.model.named_modules()
        if isinstance(module, Linear)
    }
    number = native.BLOCK_KINDS["Q4_0"][0]
    blocks = dict.fromkeys(("o_proj", "gate_up_proj", "down_proj", "lm_head"), number)
    assert kinds == {"qkv_proj": 0, **blocks}
    monkeypatch.setattr(Linear, "keep_blocks", lambda *_: 0)
    assert_same_bits(model.step_from_empty(tokens), PagedModel(ours).step_from_empty(tokens))


def test_other_widths_and_types_are_left_to_torch() -> None:
    assert isinstance(cpu_linear(torch.randn(40, 64).bfloat16(), None), TiledLinear)
    assert isinstance(cpu_linear(torch.randn(48, 48).bfloat16(), None), TiledLinear)
    assert isinstance(cpu_linear(torch.randn(48, 64).half(), None), TiledLinear)


def chosen(folder: Path, dtype: str = "bfloat16", block_size: int = 16, **changes: int) -> type:
    """The kind of attention that a small Llama gets; all its layers follow it."""
    reference(folder, "Llama", **{"head_dim": 32, **changes})
    paged = load(folder, dtype, block_size)
    assert (paged.model._stack is not None) == isinstance(paged.backend, NativeAttention)
    assert torch.isfinite(paged.solo(torch.arange(40), 40)).all()
    return type(paged.backend)


def test_a_model_is_native_if_all_of_it_can_be(tmp_path: Path) -> None:
    """Decided when it is loaded; whatever does not fit runs by torch."""
    assert chosen(tmp_path) is NativeAttention
    assert chosen(tmp_path, "float32", 32) is NativeAttention
    assert chosen(tmp_path, "float16") is ReferenceAttention
    assert chosen(tmp_path, block_size=8) is ReferenceAttention
    assert chosen(tmp_path, head_dim=16) is ReferenceAttention
    assert chosen(tmp_path, hidden_size=80) is ReferenceAttention
    assert chosen(tmp_path, intermediate_size=80) is ReferenceAttention


def test_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")
    assert chosen(tmp_path) is ReferenceAttention
    assert isinstance(cpu_linear(torch.randn(48, 32), None), TiledLinear)
    assert not fresh.exists()
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "yes")
    with pytest.raises(ConfigError, match="OCTAVO_CPU_KERNELS='yes'"):
        cpu_kernels(torch.float16)


def test_without_a_compiler_torch_serves(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chosen(tmp_path) is ReferenceAttention
    assert "No such file or directory: 'gcc'" in caplog.text
    assert not fresh.exists()


def test_without_avx512_torch_serves(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "cpu_flags", lambda: "fpu sse4_2 avx2 fma avx512fp16")
    assert chosen(tmp_path) is ReferenceAttention
    assert not fresh.exists()


def test_without_amx_vectors_serve(linear_kind: None, tmp_path: Path) -> None:
    assert chosen(tmp_path) is NativeAttention


def test_a_system_that_gives_no_tile_registers(fresh: Path, tmp_path: Path) -> None:
    """AMX is compiled in, and the request for its registers is refused: vectors, no SIGILL."""
    script = """
import ctypes, torch
# seccomp: arch_prctl(ARCH_REQ_XCOMP_PERM, ...) fails with EPERM, all else is allowed.
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte),
                ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]
from octavo.kernels.cpu.native import cpu_kernels
from octavo.layers.linear import cpu_linear
filters = (Filter * 6)(
    Filter(0x20, 0, 0, 0), Filter(0x15, 0, 3, 158), Filter(0x20, 0, 0, 16), Filter(0x15, 0, 1, 0x1023),
    Filter(0x06, 0, 0, 0x00050001), Filter(0x06, 0, 0, 0x7FFF0000))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(6, filters)), 0, 0) == 0
kernels = cpu_kernels(torch.bfloat16)
assert kernels is not None and not kernels.has_amx
weight, x = torch.randn(48, 64).bfloat16(), torch.randn(5, 64).bfloat16()
out = cpu_linear(weight, None)(x).double()
assert (out - x.double() @ weight.double().T).abs().max() < 0.2
print("served")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "served\n", done.stderr


def test_a_compiler_that_fails_is_a_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_COMPILE", (*native._COMPILE, "-fno-such-option"))
    assert cpu_kernels(torch.float32) is None
    assert "no-such-option" in caplog.text
    assert not fresh.exists()


def test_a_compiler_that_speaks_no_utf8_is_a_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gcc").write_text("#!/bin/sh\nprintf 'n\\303o' >&2\nexit 1\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cpu_kernels(torch.float32) is None
    assert "gcc --version: n" in caplog.text


def test_where_the_cache_is_in_no_home_torch_serves(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "~no-such-user-here/x")
    assert cpu_kernels(torch.float32) is None
    assert "home directory" in caplog.text


def test_compiled_once_and_again_where_the_file_is_broken(fresh: Path) -> None:
    """A truncated or foreign library is never loaded: the loader could crash on it."""
    assert cpu_kernels(torch.float32) is not None
    [library] = fresh.iterdir()
    whole, made = library.read_bytes(), library.stat().st_mtime_ns
    # The first start loads what the next one will: else a file system could run one and not the other.
    assert str(library) in Path("/proc/self/maps").read_text()
    cpu_kernels.cache_clear()
    assert cpu_kernels(torch.float32) is not None
    assert library.stat().st_mtime_ns == made
    for broken in (b"", b"no library", whole[: len(whole) // 2], whole[:-1]):
        library.unlink()  # it may be mapped
        library.write_bytes(broken)
        cpu_kernels.cache_clear()
        assert cpu_kernels(torch.float32) is not None
        assert library.read_bytes()[: len(whole) // 2] == whole[: len(whole) // 2]
    assert [library] == list(fresh.iterdir())


def test_a_cache_that_cannot_be_written_costs_only_the_caching(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file where the folder should be: root may write to read-only folders."""
    fresh.parent.write_text("")
    assert cpu_kernels(torch.float32) is not None
    assert "cannot write" in caplog.text


def test_two_processes_at_once(fresh: Path) -> None:
    """Both compile or one finds the other's; both run, and one library is left."""
    script = """
import torch
from octavo.kernels.cpu.native import cpu_kernels
kernels = cpu_kernels(torch.float32)
assert kernels.pack(torch.ones(16, 32)).sum() == 512
"""
    both = [subprocess.Popen([sys.executable, "-c", script], env=os.environ) for _ in range(2)]
    assert [one.wait(120) for one in both] == [0, 0]
    assert len(list(fresh.iterdir())) == 1


def test_the_key_knows_compiler_flags_and_processor(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another one of each is another library."""
    keys = []
    monkeypatch.setattr(native, "key_of", lambda *parts: keys.append(parts) or "one")
    flags = native._COMPILE

    def key() -> tuple[str, tuple[str, ...], str]:
        cpu_kernels.cache_clear()
        assert cpu_kernels(torch.float32) is not None
        return keys[-1]

    first = key()
    monkeypatch.setattr(native, "cpu_flags", lambda: "avx512f amx_tile")
    other_processor = key()
    monkeypatch.setattr(native, "_COMPILE", (*flags, "-DOTHER"))
    other_flags = key()
    wrapper = tmp_path / "gcc"
    wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && echo other || exec /usr/bin/gcc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    other_compiler = key()
    assert len({first, other_processor, other_flags, other_compiler}) == 4
    assert "other" in other_compiler[2]
