"""Owns tile and wave quantization: what is lost when a problem is not a multiple of the hardware.

Tile quantization: the edge tiles of a matrix do the work of full ones. Wave quantization: the last
wave of tiles keeps all SMs busy for as long as a full wave does.
"""

from __future__ import annotations

from dataclasses import dataclass


def ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


@dataclass(frozen=True)
class TileQuantization:
    """A D[M, N] cut into block_m x block_n tiles. `efficiency` is useful over computed elements."""

    tiles_m: int
    tiles_n: int
    efficiency: float

    @property
    def tiles(self) -> int:
        return self.tiles_m * self.tiles_n


@dataclass(frozen=True)
class WaveQuantization:
    """`work_units` equal pieces of work on `slots` places. `efficiency` is busy over held time."""

    waves: int
    efficiency: float


def tile_quantization(m: int, n: int, block_m: int, block_n: int) -> TileQuantization:
    """Raises ValueError unless all four extents (elements) are positive."""
    if min(m, n, block_m, block_n) < 1:
        raise ValueError(f"no tiling of {m} x {n} by {block_m} x {block_n}")
    tiles_m, tiles_n = ceil_div(m, block_m), ceil_div(n, block_n)
    return TileQuantization(tiles_m, tiles_n, m * n / (tiles_m * block_m * tiles_n * block_n))


def wave_quantization(work_units: int, slots: int) -> WaveQuantization:
    """`slots` = SMs x CTAs that fit on one SM. Raises ValueError unless both are positive."""
    if work_units < 1 or slots < 1:
        raise ValueError(f"no waves of {work_units} units on {slots} slots")
    waves = ceil_div(work_units, slots)
    return WaveQuantization(waves, work_units / (waves * slots))


def gemm_efficiency(m: int, n: int, block_m: int, block_n: int, *, slots: int) -> float:
    """Product of both losses for one GEMM: the most it can reach of a kernel's full-wave speed."""
    tile = tile_quantization(m, n, block_m, block_n)
    return tile.efficiency * wave_quantization(tile.tiles, slots).efficiency
