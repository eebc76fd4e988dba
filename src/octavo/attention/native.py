"""Attention as part of our own CPU kernels (kernels/cpu), and which CPU backend a model gets.

`models.native_stack` runs a model's layers whose backend is `NativeAttention`; nothing calls a layer.
"""

from __future__ import annotations

import torch

from octavo.attention.base import AttentionPlanner, CommonAttentionMetadata
from octavo.attention.reference import ReferenceAttention
from octavo.config.kv_cache import KVCacheSpec
from octavo.config.model import ModelConfig
from octavo.kernels.cpu.native import DEPTH, LANES, CpuKernels, cpu_kernels

_ALL_KEYS = 1 << 40


class NativeAttention:
    """The layout of its cache, and what a token sees. There is nothing to plan."""

    def __init__(self, kernels: CpuKernels, sliding_window: int | None) -> None:
        """sliding_window: keys that a token sees, its own included; None: all up to its own."""
        self.kernels = kernels
        self.window = sliding_window or _ALL_KEYS

    def kv_cache_shape(self, num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """(num_blocks, 2, num_kv_heads, numbers): K as (head_dim, block_size), V the other way round."""
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size * spec.head_dim)

    def build_metadata(self, common: CommonAttentionMetadata) -> None:
        """See AttentionPlanner."""

    def with_tables(self, metadata: None, common: CommonAttentionMetadata) -> None:
        """See AttentionPlanner."""


def make_cpu_attention(
    config: ModelConfig, dtype: torch.dtype, block_size: int, sliding_window: int | None
) -> AttentionPlanner:
    """Decides how a decoder runs: all its layers by our kernels if these can do each part, or torch."""
    kernels = cpu_kernels(dtype)
    all_sparse = all(map(config.is_sparse, range(config.num_layers)))
    widths = (config.hidden_size, config.head_dim, 0 if all_sparse else config.intermediate_size)
    if kernels is None or block_size % LANES or any(width % DEPTH for width in widths):
        spec = config.kv_cache_spec(block_size)
        return ReferenceAttention(config.num_heads, spec, sliding_window)
    return NativeAttention(kernels, sliding_window)
