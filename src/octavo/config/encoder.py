"""BERT and RoBERTa encoders: what their configs say, and how their hidden states become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from octavo.config.fields import FieldReader
from octavo.config.rope import RopeConfig

PoolingType = Literal["mean", "cls"]

# Families of one shape -> whether positions are counted from the padding token's id + 1.
ENCODERS = {"BertModel": False, "RobertaModel": True, "XLMRobertaModel": True}

_MAX_POSITIONS = 2**24


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What an encoder has and a decoder has not. Its norms have biases, and so have its linears."""

    num_positions: int
    """Rows of the table of position embeddings."""
    first_position: int
    """The row of a text's first token."""
    num_token_types: int
    pooling_type: PoolingType = "cls"
    """mean: of the hidden states of all tokens; cls: that of the first. vLLM's default."""
    normalize: bool = True
    """Whether vectors are scaled to length 1."""


def read_encoder(read: FieldReader, architecture: str) -> dict[str, Any]:
    """Fields of the ModelConfig that are not read alike for all models.

    Raises ConfigError for a missing or bad field.
    """
    num_positions = read.count("max_position_embeddings", limit=_MAX_POSITIONS)
    first = 0
    if ENCODERS[architecture]:
        first = 1 + read.count("pad_token_id", default=1, limit=_MAX_POSITIONS)
        if first >= num_positions:
            text = f"{num_positions} leaves none beyond {first}"
            raise read.error("max_position_embeddings", text)
    hidden_size, num_heads = read.count("hidden_size"), read.count("num_attention_heads", limit=512)
    if hidden_size % num_heads:
        raise read.error("num_attention_heads", f"{num_heads} does not divide {hidden_size}")
    return {
        "vocab_size": read.count("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": read.count("intermediate_size"),
        "num_layers": read.count("num_hidden_layers", limit=4096),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "rms_norm_eps": read.number("layer_norm_eps", default=1e-12),
        "rope": RopeConfig(1.0),  # there is none
        "max_position_embeddings": num_positions - first,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_ids": (),
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True),
        "encoder": EncoderConfig(num_positions, first, read.count("type_vocab_size", default=2)),
    }
