"""Shape of the K/V cache of a layer, as numbers: what one block costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """K/V of one attention layer. Layers with equal specs share a group; there is one group now."""

    block_size: int
    """Tokens a block."""
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer: K and V, one contiguous range."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype_bytes
