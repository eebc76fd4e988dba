"""What the sm_90 machine code of the small fused ops must and must not contain; needs no GPU."""

from __future__ import annotations

import functools
import re

import pytest
from tests.cpu.kernels.triton.compile_harness import (
    SHARED_LIMIT,
    Case,
    CompiledKernel,
    compile_cases,
)

from octavo.kernels.triton import activation, embedding, linear, norm, rope_cache

T = "*bf16"
NORM = {"x": T, "residual": T, "weight": T, "out": T, "eps": "fp32"}
ROPE = {
    "qkv": T, "cos": "*fp32", "sin": "*fp32", "positions": "*i64", "slot_mapping": "*i64",
    "kv_cache": T, "q_norm": T, "k_norm": T, "query": T, "block_stride": "i32:16", "eps": "fp32",
}  # fmt: skip
LINEAR = {
    "x": T, "weight": T, "bias": T, "y": T, "num_rows": "i32", "n_by_8": "i32", "k_by_8": "i32"
}  # fmt: skip


def norm_case(hidden: int, add: bool, unit_offset: bool = False) -> Case:
    options = norm.launch_options(hidden, add, unit_offset)
    return Case.of_launch(norm._rms_norm, NORM, options, f"norm {hidden} {add}")


def rope_case(
    heads: int, kv_heads: int, head_dim: int, qk_norm: bool, unit_offset: bool = False
) -> Case:
    options = rope_cache.launch_options(heads, kv_heads, head_dim, 16, qk_norm, unit_offset)
    label = f"rope {heads}/{kv_heads} {head_dim} {qk_norm}"
    return Case.of_launch(rope_cache._rope_and_cache, ROPE, options, label)


def linear_case(tile: linear.Tile, even_k: bool) -> Case:
    options = linear.launch_options(tile, even_k, bias=not even_k)
    label = f"linear {tile.block_m} {even_k}"
    return Case.of_launch(linear._fixed_linear, LINEAR, options, label)


CASES = [
    norm_case(576, False),
    norm_case(4096, True),
    norm_case(5120, True),
    norm_case(16384, True),
    norm_case(2560, True, unit_offset=True),
    rope_case(9, 3, 64, False),
    rope_case(32, 8, 128, True),
    rope_case(8, 4, 256, True, unit_offset=True),
    Case.of_launch(
        activation._silu_and_mul,
        {"x": T, "out": T},
        activation.launch_options(12288),
        "silu",
    ),
    Case.of_launch(
        activation._silu_and_mul,
        {"x": T, "out": T},
        activation.launch_options(10240, gelu=True),
        "gelu",
    ),
    Case.of_launch(
        embedding._embed,
        {"ids": "*i64", "weight": T, "out": T},
        embedding.launch_options(151_936, 4096),
        "embed",
    ),
    *(linear_case(tile, even_k) for tile in linear.TILES for even_k in (False, True)),
]
LABELS = [case.name for case in CASES]


@functools.cache
def compiled() -> dict[str, CompiledKernel]:
    return compile_cases(CASES)


@pytest.mark.parametrize("label", LABELS)
def test_fits_the_chip_and_moves_16_bytes_a_thread(label: str) -> None:
    kernel = compiled()[label]
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.registers * kernel.num_warps * 32 <= 65_536
    assert {"ld.128", "st.128"} <= kernel.features or label.startswith("linear")


@pytest.mark.parametrize("tile", linear.TILES, ids=lambda tile: str(tile.block_m))
@pytest.mark.parametrize("even_k", [False, True])
def test_linear_uses_tensor_cores_and_an_asynchronous_pipeline(
    tile: linear.Tile, even_k: bool
) -> None:
    kernel = compiled()[f"linear {tile.block_m} {even_k}"]
    assert ("wgmma" if tile.block_m >= 64 else "mma.sync") in kernel.features
    assert "cp.async" in kernel.features
    sizes = set(re.findall(r"cp\.async\.c[ag]\S* \[[^]]*\], \[[^]]*\], (\w+)", kernel.ptx))
    assert sizes == {"0x10"}  # K is only known to be a multiple of 8; still whole 16 bytes
