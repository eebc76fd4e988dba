"""The attention layer of a decoder: projections, rotary embedding, cache write, attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from octavo.attention.base import AttentionBackend, AttentionPlanner, CommonAttentionMetadata
from octavo.attention.reference import ReferenceAttention
from octavo.config.model import ModelConfig
from octavo.kernels.triton.rope_cache import rope_and_cache
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding, pair_halves


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of a KV group share in one step."""

    common: CommonAttentionMetadata
    """Of the group alone."""
    attention: Any
    """What the backend built from `common`."""
    rotary_tables: tuple[torch.Tensor, torch.Tensor]
    """From `RotaryEmbedding.tables`."""


class Attention(nn.Module):
    """Grouped-query attention over a paged cache, with norms on the heads of q and k if asked."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryEmbedding,
        backend: AttentionPlanner,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        self.unit_offset = config.norm_unit_offset
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden = self.hidden_size = config.hidden_size
        self.qkv_proj = Linear(hidden, (query, kv, kv), dtype, device, config.attention_bias)
        self.o_proj = Linear(query, (hidden,), dtype, device, config.attention_out_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, self.eps, dtype, device, self.unit_offset)
            self.k_norm = RMSNorm(self.head_dim, self.eps, dtype, device, self.unit_offset)
        self.rotary_dim = config.rope.rotary_dim(self.head_dim)
        self.rotary = rotary
        # Without `attend` it is that of models.native_stack, which does what `forward` does.
        self.backend = cast(AttentionBackend, backend)

    def arrange_heads(self) -> None:
        """After loading: where heads are rotated in part, put q and k in the order of `pair_halves`.

        So the rotation itself, and the fused GPU kernel, know whole heads only.
        """
        if self.rotary_dim == self.head_dim:
            return
        assert self.qkv_proj.weight is not None
        assert self.qkv_proj.bias is None, "not arranged here"
        assert self.q_norm is None, "not arranged here"
        order = pair_halves(self.head_dim, self.rotary_dim).to(self.qkv_proj.weight.device)
        rotated = sum(self.qkv_proj.parts[:2])
        rows = self.qkv_proj.weight.data[:rotated]
        heads = rows.view(-1, self.head_dim, rows.shape[1])
        heads.copy_(heads[:, order])

    def forward(self, x: torch.Tensor, kv_cache: torch.Tensor, step: StepContext) -> torch.Tensor:
        """x: (T, hidden_size) -> the same shape. Writes this step's K/V into kv_cache."""
        qkv = self.qkv_proj(x)
        if isinstance(self.backend, ReferenceAttention):
            query = self._write_reference(qkv, kv_cache, step, self.backend)
        else:
            query = self._write_fused(qkv, kv_cache, step)
        out = self.backend.attend(query, kv_cache, step.attention, self.scale)
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected

    def _write_reference(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        step: StepContext,
        backend: ReferenceAttention,
    ) -> torch.Tensor:
        both = self.num_heads + self.num_kv_heads
        heads = qkv.view(-1, both + self.num_kv_heads, self.head_dim)
        rotated = heads[:, :both]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = torch.split(rotated, [self.num_heads, self.num_kv_heads], 1)
            rotated = torch.cat((self.q_norm(query)[0], self.k_norm(key)[0]), 1)
        # q and k in one rotation: half the kernel calls.
        rotated = self.rotary(rotated, step.rotary_tables)
        query, key = torch.split(rotated, [self.num_heads, self.num_kv_heads], 1)
        backend.write(key, heads[:, both:], kv_cache, step.attention)
        return query

    def _write_fused(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        return rope_and_cache(
            qkv,
            *step.rotary_tables,
            step.common.positions,
            step.common.slot_mapping,
            kv_cache,
            self.num_heads,
            self.num_kv_heads,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            self.unit_offset,
        )
