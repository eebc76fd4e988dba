"""Owns the order in which output tiles are computed, and the model of what that order costs in L2.

An order is a list of (tile_m, tile_n); entry i is the i-th tile handed out: CTA c of a persistent
grid takes entries c, c + num_ctas, ... The same lists feed the host code of the ladder (uploaded as
a table) and the pictures in the docs. Knows nothing of torch or of a device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
    sides = complex(tiles_m), complex(0, tiles_n)
    long, short = sides if tiles_m > tiles_n else sides[::-1]
    return [(int(tile.real), int(tile.imag)) for tile in _hilbert_curve(0, long, short)]


def _hilbert_curve(corner: complex, along: complex, across: complex) -> Iterator[complex]:
    """The curve through the rectangle that two axis-parallel vectors span from `corner`.

    It enters at the corner and leaves at the far end of `along`. A tile (m, n) is m + n j here, so
    that vectors add.
    """
    length, depth = int(abs(along)), int(abs(across))
    step, side = along / length, across / depth
    if depth == 1 or length == 1:
        yield from (corner + step * i + side * j for i in range(length) for j in range(depth))
        return
    half = length // 2
    if 2 * length > 3 * depth:  # long and thin: two shorter ones, end to end
        first = step * _even_half(length)
        yield from _hilbert_curve(corner, first, across)
        yield from _hilbert_curve(corner + first, along - first, across)
        return
    # The three strokes of Hilbert's U: up the near side, along the far band, back down.
    near = side * _even_half(depth)
    yield from _hilbert_curve(corner, near, step * half)
    yield from _hilbert_curve(corner + near, along, across - near)
    yield from _hilbert_curve(corner + along - step + near - side, -near, step * half - along)


def _even_half(length: int) -> int:
    # A part of even length ends beside the entry of the next; an odd one would cost a diagonal.
    half = length // 2
    return half + 1 if half % 2 and length > 2 else half


@dataclass(frozen=True)
class L2Reuse:
    """What one order costs. Bytes count A and B only (C is written once whatever the order)."""

    requested_bytes: int  # what the CTAs ask of L2
    dram_bytes: int  # what misses
    compulsory_bytes: int  # A and B once each: no order can do better

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
    held: OrderedDict[tuple[str, int, int], int] = OrderedDict()  # the cache: bytes of each chunk
    used = requested = missed = 0
    for first in range(0, len(order), num_ctas):
        wave = order[first : first + num_ctas]
        for start in range(0, k, chunk_k):
            width = min(chunk_k, k - start) * element_bytes
            chunks = [(("A", m, start), block_m * width) for m, _ in wave]
            for key, size in chunks + [(("B", n, start), block_n * width) for _, n in wave]:
                requested += size
                if key not in held:
                    missed += size
                    used += size
                held[key] = size
                held.move_to_end(key)
                while used > l2_bytes:
                    used -= held.popitem(last=False)[1]
    rows = len({m for m, _ in order}) * block_m + len({n for _, n in order}) * block_n
    return L2Reuse(requested, missed, rows * k * element_bytes)
