"""The K/V cache as numbers: what a block costs, and how many blocks a request holds."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """K/V of one attention layer."""

    block_size: int
    """Tokens a block."""
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer: K and V, one contiguous range."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Block tables of a request: one for each group of layers, with blocks from one pool.

    All groups have a block for the same tokens, until the window of a group has passed them.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    """Of each group: keys that a token sees, its own included; None: all."""
    max_ahead_tokens: int = 0
    """Tokens that launched steps and the one being planned run at most for a request."""

    def num_blocks(self, num_tokens: int) -> int:
        """Length of one table that covers so many tokens."""
        return -(-num_tokens // self.block_size)

    def first_block(self, window: int | None, num_tokens: int) -> int:
        """The first block that a token after so many tokens, or a later one, sees."""
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def peak_blocks(self, num_tokens: int) -> int:
        """Blocks of all groups that a request holds at once, at most, until it has so many tokens."""
        length, ahead = self.num_blocks(num_tokens), self.max_ahead_tokens
        most = (self.num_blocks(one + ahead) + 1 if one else length for one in self.windows)
        return sum(min(length, one) for one in most)

    def most_tokens(self, num_usable_blocks: int, limit: int) -> int:
        """The longest request up to `limit` tokens that a pool with so many blocks can serve."""
        return bisect_right(range(limit + 1), num_usable_blocks, key=self.peak_blocks) - 1
