"""The attention layer of a decoder: projections, rotary embedding, and the call of a backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from octavo.attention.base import AttentionBackend
from octavo.layers.linear import Linear
from octavo.layers.rotary import RotaryEmbedding


class Attention(nn.Module):
    """Grouped-query attention over a paged cache."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5
        query, kv = num_heads * head_dim, num_kv_heads * head_dim
        self.qkv_proj = Linear(hidden_size, (query, kv, kv), dtype, device, bias)
        self.o_proj = Linear(query, (hidden_size,), dtype, device, bias)
        self.rotary = rotary
        self.backend = backend

    def forward(
        self,
        x: torch.Tensor,
        rotary_tables: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """x: (T, hidden_size) -> the same shape. Writes this step's K/V into kv_cache.

        `rotary_tables`: from `rotary.tables(positions)`, shared by all layers.
        """
        both = self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(x).view(-1, both + self.num_kv_heads, self.head_dim)
        # q and k in one rotation: half the kernel calls.
        rotated = self.rotary(heads[:, :both], rotary_tables)
        query, key = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        value = heads[:, both:]
        out = self.backend.forward(query, key, value, kv_cache, metadata, self.scale)
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected
