"""Owns tile and wave quantization: what is lost when a problem is not a multiple of the hardware.

Tile quantization: the edge tiles of a matrix do the work of full ones. Wave quantization: the last
wave of tiles keeps all SMs busy for as long as a full wave does.
"""

from __future__ import annotations

from typing import NamedTuple


def ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


class Quantized(NamedTuple):
    """How many tiles or waves, and what part of them is of use."""

    pieces: int
    efficiency: float


def tile_quantization(m: int, n: int, block_m: int, block_n: int) -> Quantized:
    """A D[M, N] cut into tiles; efficiency is useful over computed elements.

    Raises ValueError unless all four extents (elements) are positive.
    """
    if min(m, n, block_m, block_n) < 1:
        raise ValueError(f"no tiling of {m} x {n} by {block_m} x {block_n}")
    tiles = ceil_div(m, block_m) * ceil_div(n, block_n)
    return Quantized(tiles, m * n / (tiles * block_m * block_n))


def wave_quantization(work_units: int, slots: int) -> Quantized:
    """Equal pieces of work on `slots` = SMs x CTAs that fit on one SM; efficiency is busy over held
    time. Raises ValueError unless both are positive."""
    if work_units < 1 or slots < 1:
        raise ValueError(f"no waves of {work_units} units on {slots} slots")
    waves = ceil_div(work_units, slots)
    return Quantized(waves, work_units / (waves * slots))


def gemm_efficiency(m: int, n: int, block_m: int, block_n: int, *, slots: int) -> float:
    """Product of both losses for one GEMM: the most it can reach of a kernel's full-wave speed."""
    tile = tile_quantization(m, n, block_m, block_n)
    return tile.efficiency * wave_quantization(tile.pieces, slots).efficiency
