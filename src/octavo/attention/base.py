"""The seam between the model and an attention kernel: per-step inputs and the backend protocol.

The runner fills `CommonAttentionMetadata` once a step; a backend turns it into whatever its kernel
wants, and every layer passes that on. A backend knows no layers and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from octavo.config.kv_cache import KVCacheSpec
from octavo.kernels.triton.attention_plan import SPLIT_SIZE as SPLIT_SIZE


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """Which tokens run in this step and where their K/V lives. R requests, T tokens.

    Where layers are in several KV groups, block_tables and slot_mapping have one more dimension in
    front, the groups; `attention.groups` takes them apart.
    """

    query_start_loc: torch.Tensor
    """(R + 1,) int32: tokens of request r are rows query_start_loc[r] : query_start_loc[r + 1]."""
    seq_lens: torch.Tensor
    """(R,) int32: K/V length after this step. The last token of r is at seq_lens[r] - 1."""
    block_tables: torch.Tensor
    """(R, max_blocks) int32: block ids; entries past the sequence are ignored."""
    slot_mapping: torch.Tensor
    """(T,) int64: slot (block_id * block_size + offset) for each token's K/V; -1 = padding."""
    positions: torch.Tensor
    """(T,) int64: absolute position of each token."""


class AttentionPlanner(Protocol):
    """What steps and memory need of a backend. One instance serves all layers of a model."""

    def build_metadata(self, common: CommonAttentionMetadata) -> Any:
        """What layers need, computed once a step."""

    def with_tables(self, metadata: Any, common: CommonAttentionMetadata) -> Any:
        """What `build_metadata(common)` would give, for another KV group of the step of `metadata`."""

    def kv_cache_shape(self, num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """Shape of one layer's cache. A block is one contiguous range."""


class AttentionBackend(AttentionPlanner, Protocol):
    """Paged attention as layers call it."""

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, scale: float
    ) -> torch.Tensor:
        """Attend causally to each request's K/V, that of this step's tokens included.

        query: (T, num_heads, head_dim), one dtype with kv_cache (see `kv_cache_shape`), which
        already holds this step's K/V. Returns (T, num_heads, head_dim) of that dtype; rows of
        padding tokens are zero.
        """
