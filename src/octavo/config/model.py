"""What a model is, as numbers: the only place that reads Hugging Face configs and GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and scaling kind with its parameters."""

    theta: float
    kind: str = "default"
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a decoder, complete: nothing else is read from the checkpoint's config."""

    architecture: str
    """Hugging Face class name, e.g. LlamaForCausalLM."""
    path: Path
    """Folder or .gguf file with the weights."""
    load_format: Literal["safetensors", "gguf", "dummy"]
    dtype: Literal["float32", "bfloat16", "float16"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
