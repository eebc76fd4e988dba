"""Shapes that have broken matmul kernels."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.kernels.matmul.registry import Rung


def ragged_shapes(rung: Rung) -> Iterator[tuple[int, int, int]]:
    """Shapes that have broken kernels elsewhere: M of 1..130 in turn with N and K of 8, 64 and a tile
    plus or minus 8; one tile in each dimension; several tiles with ragged ends; odd N."""
    bm, bn, bk = rung.block_m, rung.block_n, max(rung.block_k, 8)
    wide = (8, 16, 64, 72, bn - 8, bn, bn + 8, 2 * bn + 8)
    deep = (8, 16, 64, 72, 128, 200, 328)
    for index, m in enumerate(range(1, 131)):
        yield m, wide[index % len(wide)], deep[index % len(deep)]
    yield from ((bm, bn, bk), (bm, bn, 8), (1, bn, bk), (bm, 8, bk), (1, 8, 8))
    yield from ((bm + 1, bn + 8, 264), (2 * bm + 1, 8, 1024), (3 * bm - 1, 3 * bn - 8, 136))
    yield from ((5 * bm, 7 * bn, 192), (17 * bm + 3, 9 * bn + 24, 64), (128, 128, 64))
    # With one cluster: many tiles; 16 K blocks of deferred stores, then rounds and a rest.
    yield from ((520, 520, 1032), (520, 520, 1096), (520, 520, 1416))
    yield from ((33, 1, 64), (70, 77, 72), (257, 2 * bn + 3, 136), (1, 1, 8))
