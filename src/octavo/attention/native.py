"""Paged attention by our own CPU kernels (kernels/cpu/decoder.c), and the choice between CPU backends.

Keys are taken in tiles of 64 at absolute positions from 0, with one running maximum, so the bits of
a token's output depend on its own keys only. In the cache K lies transposed within its block.
"""

from __future__ import annotations

import torch

from octavo.attention.base import AttentionBackend, CommonAttentionMetadata
from octavo.attention.reference import ReferenceAttention
from octavo.config.kv_cache import KVCacheSpec
from octavo.kernels.cpu.native import LANES, CpuKernels, HeadShape, cpu_kernels

_ALL_KEYS = 1 << 40


class NativeAttention:
    """AttentionBackend of CPUs with a C compiler. block_size % 16 == 0 and head_dim % 32 == 0.

    Slots that no token of a request has written are never used, whatever they contain.
    """

    def __init__(
        self,
        num_heads: int,
        spec: KVCacheSpec,
        kernels: CpuKernels,
        sliding_window: int | None = None,
    ) -> None:
        """sliding_window: keys that a token sees, its own included; None: all up to its own."""
        self._kernels = kernels
        self.shape = HeadShape(num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size)
        self.window = sliding_window or _ALL_KEYS

    def kv_cache_shape(self, num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """(num_blocks, K or V, num_kv_heads, block): K as (head_dim, block_size), V transposed."""
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size * spec.head_dim)

    def build_metadata(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Nothing to plan."""
        return common

    def with_tables(
        self, metadata: CommonAttentionMetadata, common: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        """See AttentionBackend."""
        return common

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotary_tables: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: CommonAttentionMetadata,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 0.0,
        unit_offset: bool = False,
    ) -> torch.Tensor:
        """Norms of the heads of q and k if given, rotation, and K/V into the cache.

        qkv: (T, (num_heads + 2 * num_kv_heads) * head_dim), overwritten. Returns the query, a view.
        """
        self._kernels.rotate_and_write(
            qkv,
            rotary_tables,
            norms,
            eps,
            unit_offset,
            metadata.slot_mapping,
            kv_cache,
            self.shape,
        )
        heads, head_dim = self.shape.heads, self.shape.head_dim
        return qkv.view(qkv.shape[0], -1, head_dim)[:, :heads]

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CommonAttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """See AttentionBackend. Computes in fp32, returns the dtype of `query`."""
        return self._kernels.attend(
            query,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            self.shape,
            scale,
            self.window,
        )


def make_cpu_attention(
    num_heads: int, spec: KVCacheSpec, dtype: torch.dtype, sliding_window: int | None = None
) -> AttentionBackend:
    """The fastest backend that this machine and these shapes allow."""
    kernels = cpu_kernels(dtype)
    if kernels is None or spec.block_size % LANES or spec.head_dim % (2 * LANES):
        return ReferenceAttention(num_heads, spec, sliding_window)
    return NativeAttention(num_heads, spec, kernels, sliding_window)
