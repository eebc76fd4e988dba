"""The decoder stack: embedding, layers, final norm, lm_head. Families differ by its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.base import AttentionPlanner, CommonAttentionMetadata
from octavo.attention.groups import ModelBackend, group_backend
from octavo.attention.native import NativeAttention
from octavo.config.engine import LinearBackend
from octavo.config.model import ModelConfig
from octavo.layers.activation import silu_and_mul
from octavo.layers.attention import Attention, StepContext
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import Linear
from octavo.layers.moe import MixtureOfExperts
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.native_stack import NativeStack

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a checkpoint tensor belongs: rows of a parameter."""

    parameter: str
    """Name as in named_parameters() before finalize()."""
    start: int
    shape: tuple[int, ...]
    """Shape of the checkpoint tensor; its first dimension is the number of rows."""

    @property
    def rows(self) -> slice:
        """Of the parameter."""
        return slice(self.start, self.start + self.shape[0])


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with gelu."""

    def __init__(
        self, config: ModelConfig, inner: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, (inner, inner), dtype, device, bias)
        self.down_proj = Linear(inner, (hidden,), dtype, device, bias)
        self.gelu = config.gelu

    def forward(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        """x: (T, hidden_size) -> the same shape. Called as MixtureOfExperts is."""
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x), self.gelu))
        return out


def _make_mlp(
    config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device
) -> MLP | MixtureOfExperts:
    if config.moe is None or not config.is_sparse(layer):
        return MLP(config, config.intermediate_size, dtype, device)
    inner = config.moe.shared_intermediate_size
    shared = MLP(config, inner, dtype, device) if inner else None
    return MixtureOfExperts(config.moe, config.hidden_size, dtype, device, shared)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and maybe before another one, on a residual stream."""

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, backend: AttentionPlanner,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        norm = partial(
            RMSNorm, config.hidden_size, config.rms_norm_eps, dtype, device, config.norm_unit_offset
        )
        self.input_layernorm = norm()
        self.self_attn = Attention(config, rotary, backend, dtype, device)
        self.attention_out_norm = norm() if config.post_norms else None
        self.post_attention_layernorm = norm()
        self.mlp = _make_mlp(config, layer, dtype, device)
        self.mlp_out_norm = norm() if config.post_norms else None

    def forward(
        self, x: Tensor, residual: Tensor | None, kv_cache: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """x: (T, hidden_size), not yet added to the residual. Returns both for the next layer."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, kv_cache, step)
        if self.attention_out_norm is not None:
            x, _ = self.attention_out_norm(x)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x, step.common.slot_mapping)
        if self.mlp_out_norm is not None:
            x, _ = self.mlp_out_norm(x)
        return x, residual


class DecoderModel(nn.Module):
    """A decoder-only language model. Call under torch.inference_mode().

    Usable after its weights were loaded (`weights.loader.load_weights`) and `finalize()`.
    """

    def __init__(self, config: ModelConfig, backend: ModelBackend, device: torch.device) -> None:
        super().__init__()
        self.config = config
        dtype = TORCH_DTYPES[config.dtype]
        hidden = config.hidden_size
        self.embed_tokens = Embedding(
            config.vocab_size, hidden, dtype, device, config.embedding_scale
        )
        self.rotary = self.local_rotary = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, device
        )
        if config.local_rope is not None:
            self.local_rotary = RotaryEmbedding(
                config.local_rope, config.head_dim, config.max_position_embeddings, device
            )
        self._groups = config.layer_groups()
        group_of = {layer: number for number, group in enumerate(self._groups) for layer in group}
        self._group_of = [group_of[layer] for layer in range(config.num_layers)]

        def make_layer(layer: int) -> DecoderLayer:
            own = group_backend(backend, self._group_of[layer])
            return DecoderLayer(config, layer, self._rotary_of(layer), own, dtype, device)

        self.layers = nn.ModuleList(map(make_layer, range(config.num_layers)))
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype, device, config.norm_unit_offset)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, hidden, dtype, device, tied)
        self._stack: NativeStack | None = None

    def forward(
        self,
        input_ids: Tensor,
        common: CommonAttentionMetadata,
        kv_caches: list[Tensor],
        attention: Any,
    ) -> Tensor:
        """Run one step and write its K/V.

        input_ids: (T,) int32 or int64; kv_caches: one a layer, shaped by the backend; attention:
        from the backend's build_metadata(common). Returns the final hidden states (T, hidden_size).
        """
        steps = self._steps(common, attention)
        x: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        if self._stack is not None:
            x, residual = self._stack.run(x, kv_caches, steps)
        else:
            for layer, group, kv_cache in zip(self.layers, self._group_of, kv_caches, strict=True):
                x, residual = layer(x, residual, kv_cache, steps[group])
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def _rotary_of(self, layer: int) -> RotaryEmbedding:
        return self.rotary if layer in self.config.global_layers else self.local_rotary

    def _steps(self, common: CommonAttentionMetadata, attention: Any) -> list[StepContext]:
        """What the layers of each KV group share in this step."""
        parts = attention if len(self._groups) > 1 else [(common, attention)]
        rotaries = {self.rotary, self.local_rotary}
        tables = {rotary: rotary.tables(common.positions) for rotary in rotaries}
        return [
            StepContext(own, metadata, tables[self._rotary_of(group[0])])
            for group, (own, metadata) in zip(self._groups, parts, strict=True)
        ]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: (S, hidden_size) -> (S, vocab_size), same dtype, written to `out` if given."""
        logits: Tensor = self.lm_head(hidden, out)
        return logits

    def finalize(self, linear_backend: LinearBackend) -> None:
        """Make all linear weights ready to run, once, after loading."""
        for module in self.modules():  # parents come before their children
            if isinstance(module, Attention):
                module.arrange_heads()
            if isinstance(module, MixtureOfExperts):
                module.finalize(linear_backend)
            if isinstance(module, Linear):
                module.finalize(linear_backend)
        layers: list[Any] = list(self.layers)
        backend = layers[0].self_attn.backend
        if isinstance(backend, NativeAttention):
            self._stack = NativeStack(self.config, layers, self._group_of, backend.kernels)
