"""BERT and RoBERTa encoders: each token sees all tokens of its text, in one pass, without a KV cache.

Rows go through the row-invariant layers together; what joins tokens, attention and pooling, works on one
text at a time in tensors that hold nothing else. So a text's bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from octavo.config.encoder import PoolingType
from octavo.config.engine import LinearBackend
from octavo.config.model import ModelConfig
from octavo.layers.activation import gelu
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm
from octavo.models.decoder import TORCH_DTYPES, WeightTarget


class EncoderLayer(nn.Module):
    """Attention and MLP, each added to its input and normed."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.heads_shape = (3, config.num_heads, config.head_dim)
        self.qkv_proj = Linear(hidden, (hidden,) * 3, dtype, device, bias=True)
        self.o_proj = Linear(hidden, (hidden,), dtype, device, bias=True)
        self.attention_norm = LayerNorm(hidden, eps, dtype, device)
        self.up_proj = Linear(hidden, (inner,), dtype, device, bias=True)
        self.down_proj = Linear(inner, (hidden,), dtype, device, bias=True)
        self.output_norm = LayerNorm(hidden, eps, dtype, device)

    def forward(self, x: torch.Tensor, lens: list[int]) -> torch.Tensor:
        """x: (T, hidden_size), texts of `lens` tokens one after another -> the same shape."""
        qkv = self.qkv_proj(x).view(-1, *self.heads_shape)
        attended = torch.cat([attend(one) for one in torch.split(qkv, lens)])
        x = self.attention_norm(self.o_proj(attended) + x)
        out: torch.Tensor = self.output_norm(self.down_proj(gelu(self.up_proj(x))) + x)
        return out


class BertEncoder(nn.Module):
    """Token ids to hidden states. Call under torch.inference_mode().

    Usable after its weights were loaded (`weights.loader.load_encoder`) and `finalize()`.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        assert config.encoder is not None
        dtype, hidden = TORCH_DTYPES[config.dtype], config.hidden_size
        self.first_position = config.encoder.first_position
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype, device)
        self.embed_positions = Embedding(config.encoder.num_positions, hidden, dtype, device)
        self.embed_types = Embedding(config.encoder.num_token_types, hidden, dtype, device)
        self.embedding_norm = LayerNorm(hidden, config.rms_norm_eps, dtype, device)
        self.layers = nn.ModuleList(
            EncoderLayer(config, dtype, device) for _ in range(config.num_layers)
        )

    def forward(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Token ids of each text, none empty -> (its tokens, hidden_size) each."""
        device, lens = self.embed_tokens.weight.device, [len(text) for text in texts]
        positions = [self.first_position + index for size in lens for index in range(size)]
        tokens = [token for text in texts for token in text]
        x = self.embed_tokens(torch.tensor(tokens, device=device)) + self.embed_types.weight[0]
        x = self.embedding_norm(x + self.embed_positions(torch.tensor(positions, device=device)))
        for layer in self.layers:
            x = layer(x, lens)
        return list(torch.split(x, lens))

    def finalize(self, linear_backend: LinearBackend) -> None:
        """Make all linear weights ready to run, once, after loading."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize(linear_backend)


def attend(qkv: torch.Tensor) -> torch.Tensor:
    """Attention of one text's tokens to each other. qkv: (L, 3, heads, dim) -> (L, heads * dim)."""
    # A copy, whose place in memory does not tell who else is in the batch. Its batch size is always
    # one: what torch runs for several texts at once depends on how many they are.
    query, key, value = qkv.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)
    out = F.scaled_dot_product_attention(query[None], key[None], value[None])
    return out[0].transpose(0, 1).flatten(1)


def pool(hidden: torch.Tensor, pooling_type: PoolingType, normalize: bool) -> torch.Tensor:
    """One text's hidden states (L, hidden_size) -> its vector (hidden_size,), fp32."""
    vector = hidden[0].float() if pooling_type == "cls" else hidden.float().mean(0)
    return F.normalize(vector, dim=0) if normalize else vector


# Our linears and norms of a layer -> what the checkpoint calls them, or their parts.
_LAYER_NAMES = {
    "qkv_proj": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "o_proj": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up_proj": ("intermediate.dense",),
    "down_proj": ("output.dense",),
    "output_norm": ("output.LayerNorm",),
}


def weight_map(config: ModelConfig) -> dict[str, WeightTarget]:
    """Checkpoint tensor name -> its place in the model. Complete but for the unused pooler."""
    assert config.encoder is not None
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = {
        "word": ("embed_tokens", config.vocab_size),
        "position": ("embed_positions", config.encoder.num_positions),
        "token_type": ("embed_types", config.encoder.num_token_types),
    }
    targets = {
        f"embeddings.{name}_embeddings.weight": WeightTarget(f"{ours}.weight", 0, (rows, hidden))
        for name, (ours, rows) in tables.items()
    }
    for kind in ("weight", "bias"):
        place = WeightTarget(f"embedding_norm.{kind}", 0, (hidden,))
        targets[f"embeddings.LayerNorm.{kind}"] = place
    for index in range(config.num_layers):
        for ours, names in _LAYER_NAMES.items():
            rows = inner if ours == "up_proj" else hidden
            columns = inner if ours == "down_proj" else hidden
            shape = (rows,) if ours.endswith("norm") else (rows, columns)
            for part, name in enumerate(names):
                theirs, own = f"encoder.layer.{index}.{name}", f"layers.{index}.{ours}"
                start = part * rows
                targets[f"{theirs}.weight"] = WeightTarget(f"{own}.weight", start, shape)
                targets[f"{theirs}.bias"] = WeightTarget(f"{own}.bias", start, (rows,))
    return targets
