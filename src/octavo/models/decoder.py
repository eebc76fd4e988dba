"""The decoder stack: embedding, layers, final norm, lm_head. Families differ by its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octavo.attention.base import AttentionBackend, CommonAttentionMetadata
from octavo.config.engine import LinearBackend
from octavo.config.kv_cache import KVCacheSpec
from octavo.config.model import ModelConfig
from octavo.layers.activation import silu_and_mul
from octavo.layers.attention import Attention, StepContext
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a checkpoint tensor belongs: rows of a parameter."""

    parameter: str
    """Name as in named_parameters() before finalize()."""
    start: int
    shape: tuple[int, ...]
    """Shape of the checkpoint tensor; its first dimension is the number of rows."""


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, (inner, inner), dtype, device, bias)
        self.down_proj = Linear(inner, (hidden,), dtype, device, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (T, hidden_size) -> the same shape."""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, on a residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryEmbedding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype, device)
        self.self_attn = Attention(config, rotary, backend, dtype, device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        kv_cache: torch.Tensor,
        step: StepContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (T, hidden_size), not yet added to the residual. Returns both for the next layer."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, kv_cache, step)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class DecoderModel(nn.Module):
    """A decoder-only language model. Call under torch.inference_mode().

    Usable after its weights were loaded (`weights.loader.load_weights`) and `finalize()`.
    """

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        dtype = TORCH_DTYPES[config.dtype]
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype, device)
        self.rotary = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.rotary, backend, dtype, device)
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype, device)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, hidden, dtype, device, tied)

    def forward(
        self,
        input_ids: torch.Tensor,
        common: CommonAttentionMetadata,
        kv_caches: list[torch.Tensor],
        attention: Any,
    ) -> torch.Tensor:
        """Run one step and write its K/V.

        input_ids: (T,) int32 or int64; kv_caches: one a layer, shaped by the backend; attention:
        from the backend's build_metadata(common). Returns the final hidden states (T, hidden_size).
        """
        step = StepContext(common, attention, self.rotary.tables(common.positions))
        x: torch.Tensor = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, kv_cache, step)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: (S, hidden_size) -> (S, vocab_size), same dtype, written to `out` if given."""
        logits: torch.Tensor = self.lm_head(hidden, out)
        return logits

    def kv_cache_specs(self, block_size: int) -> list[KVCacheSpec]:
        """What each layer asks of the KV cache."""
        return [self.config.kv_cache_spec(block_size) for _ in self.layers]

    def finalize(self, linear_backend: LinearBackend) -> None:
        """Make all linear weights ready to run, once, after loading."""
        for module in self.modules():  # parents come before their children
            if isinstance(module, Attention):
                module.arrange_heads()
            if isinstance(module, Linear):
                module.finalize(linear_backend)
