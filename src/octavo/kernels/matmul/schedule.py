"""Owns the order in which output tiles are computed, and the model of what that order costs in L2.

An order is a list of (tile_m, tile_n); entry i is the i-th tile handed out: CTA c of a persistent
grid takes entries c, c + num_ctas, ... The same lists feed the host code of the ladder (uploaded as
a table) and the pictures in the docs. Knows nothing of torch or of a device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Tile = tuple[int, int]
Order = list[Tile]


def _check_extent(tiles_m: int, tiles_n: int) -> None:
    if tiles_m < 1 or tiles_n < 1:
        raise ValueError(f"a grid of {tiles_m} x {tiles_n} tiles has no tile")


def naive_order(tiles_m: int, tiles_n: int) -> Order:
    """Row after row: the order a plain grid launch gives. Raises ValueError on an empty grid."""
    _check_extent(tiles_m, tiles_n)
    return [(m, n) for m in range(tiles_m) for n in range(tiles_n)]


def grouped_order(tiles_m: int, tiles_n: int, group: int) -> Order:
    """Bands of `group` tile rows, each band walked column by column; the last band may be thinner.

    A run of `group * w` consecutive tiles needs only `group` panels of A and `w` of B, where the
    naive order needs one panel of A and `group * w` of B.
    """
    _check_extent(tiles_m, tiles_n)
    if group < 1:
        raise ValueError(f"group must be at least 1, not {group}")
    return [
        (m, n)
        for first in range(0, tiles_m, group)
        for n in range(tiles_n)
        for m in range(first, min(first + group, tiles_m))
    ]


def hilbert_order(tiles_m: int, tiles_n: int) -> Order:
    """A Hilbert-like curve over any rectangle: each tile once, each step to one of 8 neighbours.

    Any run of consecutive tiles is a compact blob, whatever its length, so no group size has to be
    tuned to the number of SMs. Every step is to one of the 4 direct neighbours, except for a single
    diagonal one when the longer side is odd and the shorter even.
    """
    _check_extent(tiles_m, tiles_n)
    order: Order = []
    if tiles_n >= tiles_m:
        _hilbert_fill(order, (0, 0), (0, tiles_n), (tiles_m, 0))
    else:
        _hilbert_fill(order, (0, 0), (tiles_m, 0), (0, tiles_n))
    return order


def _hilbert_fill(order: Order, corner: Tile, along: Tile, across: Tile) -> None:
    """Append the curve through the rectangle that two axis-parallel vectors span from `corner`.

    It enters at the corner and leaves at the far end of `along`. Lengths are in tiles, signed.
    """
    length, depth = abs(sum(along)), abs(sum(across))
    step, side = _direction(along), _direction(across)
    if depth == 1 or length == 1:
        run, unit = (length, step) if depth == 1 else (depth, side)
        order.extend(_moved(corner, unit, i) for i in range(run))
        return
    half = length // 2
    if 2 * length > 3 * depth:  # long and thin: two shorter ones, end to end
        half = _even_half(length)
        _hilbert_fill(order, corner, _scaled(step, half), across)
        _hilbert_fill(order, _moved(corner, step, half), _scaled(step, length - half), across)
        return
    # The three strokes of Hilbert's U: up the near side, along the far band, back down.
    near = _even_half(depth)
    _hilbert_fill(order, corner, _scaled(side, near), _scaled(step, half))
    _hilbert_fill(order, _moved(corner, side, near), along, _scaled(side, depth - near))
    last = _moved(_moved(corner, step, length - 1), side, near - 1)
    _hilbert_fill(order, last, _scaled(side, -near), _scaled(step, half - length))


def _even_half(length: int) -> int:
    # A part of even length ends beside the entry of the next; an odd one would cost a diagonal.
    half = length // 2
    return half + 1 if half % 2 and length > 2 else half


def _direction(vector: Tile) -> Tile:
    return (vector[0] > 0) - (vector[0] < 0), (vector[1] > 0) - (vector[1] < 0)


def _scaled(vector: Tile, factor: int) -> Tile:
    return vector[0] * factor, vector[1] * factor


def _moved(start: Tile, step: Tile, count: int) -> Tile:
    return start[0] + step[0] * count, start[1] + step[1] * count


@dataclass(frozen=True)
class L2Reuse:
    """What one order costs. Bytes count A and B only (C is written once whatever the order)."""

    requested_bytes: int  # what the CTAs ask of L2
    dram_bytes: int  # what misses
    compulsory_bytes: int  # A and B once each: no order can do better
    wave_panels: float  # mean over full waves of distinct A plus B panels in one wave

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.dram_bytes / self.requested_bytes


def simulate_l2(
    order: Sequence[Tile],
    *,
    block_m: int,
    block_n: int,
    k: int,
    num_ctas: int,
    l2_bytes: int,
    element_bytes: int = 2,
    chunk_k: int = 512,
) -> L2Reuse:
    """Replay an order on `num_ctas` CTAs in lockstep against an LRU cache of `l2_bytes`.

    A wave is the next `num_ctas` tiles; its CTAs advance through K together, `chunk_k` elements at
    a time, each reading its chunk of one A panel (block_m rows) and one B panel (block_n rows).
    Real CTAs drift apart and the real L2 is hashed over two partitions, so this ranks orders; it
    does not predict a hit rate to the per cent.
    """
    if not order or num_ctas < 1 or k < 1 or chunk_k < 1:
        raise ValueError("the simulation needs tiles, CTAs and a positive k")
    cache = _LruBytes(l2_bytes)
    requested = 0
    panels: list[int] = []
    for first in range(0, len(order), num_ctas):
        wave = order[first : first + num_ctas]
        if len(wave) == num_ctas or first == 0:
            panels.append(len({m for m, _ in wave}) + len({n for _, n in wave}))
        for start in range(0, k, chunk_k):
            width = min(chunk_k, k - start) * element_bytes
            for m, n in wave:
                cache.touch(("A", m, start), block_m * width)
                cache.touch(("B", n, start), block_n * width)
                requested += (block_m + block_n) * width
    rows = len({m for m, _ in order}) * block_m + len({n for _, n in order}) * block_n
    return L2Reuse(requested, cache.missed, rows * k * element_bytes, sum(panels) / len(panels))


class _LruBytes:
    """A fully associative LRU cache that counts the bytes it had to fetch."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.missed = 0
        self._held: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        self._used = 0

    def touch(self, key: tuple[str, int, int], size: int) -> None:
        if key in self._held:
            self._held.move_to_end(key)
            return
        self.missed += size
        self._held[key] = size
        self._used += size
        while self._used > self.capacity and self._held:
            _, freed = self._held.popitem(last=False)
            self._used -= freed
