"""Quantization, occupancy and roofline against hand-worked cases."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import KernelError
from octavo.kernels.matmul.occupancy import (
    MAX_WARPS,
    REGISTERS,
    WARP,
    occupancy,
)
from octavo.kernels.matmul.quantization import (
    gemm_efficiency,
    tile_quantization,
    wave_quantization,
)
from octavo.kernels.matmul.roofline import (
    H100_PCIE,
    H200,
    Roofline,
    device_roofline,
    gemm_bytes,
    gemm_flops,
    peak_flops,
    tile_intensity,
)

extents = st.integers(1, 5000)


def test_33_by_33_with_32_tiles_wastes_three_quarters() -> None:
    found = tile_quantization(33, 33, 32, 32)
    assert found.pieces == 2 * 2
    assert found.efficiency == pytest.approx(1089 / 4096)
    assert tile_quantization(32, 32, 32, 32).efficiency == 1.0


def test_115_blocks_on_114_sms_take_two_waves() -> None:
    found = wave_quantization(115, 114)
    assert found.pieces == 2
    assert found.efficiency == pytest.approx(115 / 228)
    assert wave_quantization(114, 114).efficiency == 1.0


@given(extents, extents, st.integers(1, 300), st.integers(1, 300), st.integers(1, 200))
def test_efficiencies_are_fractions_and_tiles_cover(
    m: int, n: int, bm: int, bn: int, slots: int
) -> None:
    tile = tile_quantization(m, n, bm, bn)
    assert 0 < tile.efficiency <= 1
    assert tile.pieces == len(range(0, m, bm)) * len(range(0, n, bn))
    wave = wave_quantization(tile.pieces, slots)
    assert (wave.pieces - 1) * slots < tile.pieces <= wave.pieces * slots
    both = gemm_efficiency(m, n, bm, bn, slots=slots)
    assert both == pytest.approx(tile.efficiency * wave.efficiency)


def test_llama_qkv_at_1024_tokens_prefers_a_192_row_tile() -> None:
    # 192 tiles on 132 SMs 0.73; 192x256 makes 128 tiles in one wave, 0.97.
    assert gemm_efficiency(6144, 1024, 128, 256, slots=132) == pytest.approx(192 / 264)
    assert gemm_efficiency(6144, 1024, 192, 256, slots=132) == pytest.approx(128 / 132)


def test_1024_threads_of_32_registers_fill_a_hopper_sm() -> None:
    found = occupancy(1024, 32)
    assert (found.ctas_per_sm, found.warps_per_sm, found.fraction) == (2, 64, 1.0)
    assert found.limiters == ("threads", "registers")
    # One register more is rounded up to 40 a thread, and only one CTA fits.
    cliff = occupancy(1024, 33)
    assert (cliff.ctas_per_sm, cliff.fraction, cliff.limiters) == (1, 0.5, ("registers",))


def test_the_384_thread_wgmma_kernel_owns_its_sm() -> None:
    found = occupancy(384, 168, 227 * 1024)
    assert found.ctas_per_sm == 1
    assert found.limiters == ("registers", "shared memory")
    assert found.fraction == pytest.approx(12 / 64)


def test_shared_memory_counts_the_reserved_kilobyte() -> None:
    # Two CTAs of 113 KB fill 228 KB exactly with their reserved kilobytes; 16 bytes more and one is
    # left.
    assert occupancy(128, 32, 113 * 1024).ctas_per_sm == 2
    assert occupancy(128, 32, 113 * 1024 + 16).ctas_per_sm == 1
    assert occupancy(32, 16).limiters == ("CTA slots",)


@given(st.integers(1, 1024), st.integers(1, 64), st.integers(0, 227 * 1024))
def test_more_of_anything_never_raises_occupancy(threads: int, regs: int, smem: int) -> None:
    base = occupancy(threads, regs, smem).ctas_per_sm
    assert occupancy(threads, regs, min(smem + 512, 227 * 1024)).ctas_per_sm <= base
    assert occupancy(threads, regs + 1 if regs < 64 else regs, smem).ctas_per_sm <= base
    assert base * threads <= MAX_WARPS * WARP
    registers_of_a_warp = math.ceil(regs * WARP / 256) * 256
    assert base * registers_of_a_warp * math.ceil(threads / WARP) <= REGISTERS


@pytest.mark.parametrize("bad", [(0, 32, 0), (1025, 32, 0), (128, 256, 0), (128, 32, 233_000)])
def test_impossible_launches_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(KernelError):
        occupancy(*bad)


def test_a_launch_that_needs_more_registers_than_the_sm_has_is_refused() -> None:
    with pytest.raises(KernelError, match="do not fit"):
        occupancy(1024, 128)


def test_peaks_follow_the_clock() -> None:
    assert peak_flops(H200, "bf16") == pytest.approx(989.4e12, rel=1e-3)
    assert peak_flops(H200, "bf16", 1980) == pytest.approx(1071e12, rel=1e-3)
    assert peak_flops(H200, "fp8") == 2 * peak_flops(H200, "bf16")
    assert peak_flops(H100_PCIE, "bf16") == pytest.approx(756e12, rel=2e-3)
    with pytest.raises(ValueError, match="int4"):
        peak_flops(H200, "int4")
    with pytest.raises(ValueError, match="MHz"):
        peak_flops(H200, "bf16", math.nan)


def test_ridge_point_and_both_sides_of_it() -> None:
    roof = device_roofline(H200, "bf16")
    assert roof.ridge_point == pytest.approx(206.1, abs=0.1)
    assert roof.attainable(1.0) == 4.8e12
    assert roof.attainable(1e6) == roof.flops_per_s
    assert (roof.limiter(200), roof.limiter(210)) == ("memory", "compute")
    with pytest.raises(ValueError, match="positive"):
        Roofline(math.nan, 1.0)


def test_gemm_counts_by_hand() -> None:
    assert gemm_flops(2, 3, 5) == 60
    assert gemm_bytes(2, 3, 5) == 2 * (10 + 15 + 6)
    assert gemm_bytes(2, 3, 5, element_bytes=1, out_bytes=2) == 25 + 12
    # One token against a weight matrix moves two bytes of weight per multiply-add.
    assert gemm_flops(1, 4096, 4096) / gemm_bytes(1, 4096, 4096) == pytest.approx(1, rel=1e-3)
    # A thread that reads both operands of every multiply-add, against a 128x256 tile.
    assert tile_intensity(1, 1, element_bytes=4) == 0.25
    assert tile_intensity(128, 256) == pytest.approx(85.33, abs=0.01)


@given(extents, extents, extents)
def test_least_time_is_the_roofline_seen_from_time(m: int, n: int, k: int) -> None:
    roof = device_roofline(H200, "bf16")
    flops, traffic = gemm_flops(m, n, k), gemm_bytes(m, n, k)
    speed = flops / roof.seconds(flops, traffic)
    assert speed == pytest.approx(roof.attainable(flops / traffic))
