"""Owns the shared-memory swizzles of TMA and wgmma as arithmetic on byte offsets.

A swizzle permutes the 16-byte chunks of a tile so that eight rows of one chunk column, which is
what the tensor core reads at once, fall into 32 different banks. TMA writes and wgmma reads with
the same rule, so only code that touches the tile by hand (the epilogue, tests) computes it.
PTX ISA, "Swizzling modes" of the tensor chapter, and the wgmma matrix-descriptor section.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CHUNK_BYTES = 16  # what one thread moves at most, and the unit that swizzles permute
BANKS = 32
BANK_BYTES = 4


@dataclass(frozen=True)
class Swizzle:
    """One mode: `bits` address bits from bit 7 up are XORed into those from bit 4 up.

    `span_bytes` is the row width of the tile; a tile's base address must be a multiple of 8 rows,
    after which the pattern repeats. `mask` has the address bits that decide the permutation.
    """

    bits: int

    @property
    def span_bytes(self) -> int:
        return CHUNK_BYTES << self.bits

    @property
    def mask(self) -> int:
        return ((1 << self.bits) - 1) << 7

    def apply(self, offset: int) -> int:
        """Byte offset from the tile's base before -> after. Its own inverse."""
        if offset < 0:
            raise ValueError(f"offset {offset} is before the tile")
        return offset ^ ((offset & self.mask) >> 3)


SWIZZLES = {"32B": Swizzle(1), "64B": Swizzle(2), "128B": Swizzle(3)}


def conflict_degree(offsets: Iterable[int], access_bytes: int) -> int:
    """Passes that shared memory needs to serve these accesses of one warp phase: 1 is ideal.

    `offsets` are the byte addresses of the threads served together: 32 threads of 4 bytes, 16 of 8
    or 8 of 16. Threads that read the same 4-byte word share it (broadcast). Raises ValueError on an
    access that is wider than 16 bytes or not aligned to its width.
    """
    if access_bytes not in (4, 8, 16):
        raise ValueError(f"no shared-memory access has {access_bytes} bytes")
    words: dict[int, set[int]] = {}
    for offset in offsets:
        if offset % access_bytes:
            raise ValueError(f"offset {offset} is not a multiple of {access_bytes}")
        for word in range(offset // BANK_BYTES, (offset + access_bytes) // BANK_BYTES):
            words.setdefault(word % BANKS, set()).add(word)
    return max((len(held) for held in words.values()), default=0)


def column_conflicts(swizzle: Swizzle | None, row_bytes: int, chunk: int) -> int:
    """Passes to read the same 16-byte chunk of 8 consecutive rows (one 8x16B core matrix)."""
    raw = [row * row_bytes + chunk * CHUNK_BYTES for row in range(8)]
    return conflict_degree([swizzle.apply(o) if swizzle else o for o in raw], CHUNK_BYTES)
