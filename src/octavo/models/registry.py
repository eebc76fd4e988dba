"""Which architecture is built how."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from octavo.attention.groups import ModelBackend
from octavo.config.encoder import ENCODERS
from octavo.config.model import ModelConfig
from octavo.models import bert, llama
from octavo.models.decoder import DecoderModel, WeightTarget

WEIGHT_MAPS: dict[str, Callable[[ModelConfig], dict[str, WeightTarget]]] = {
    "LlamaForCausalLM": llama.weight_map,
    "Qwen2ForCausalLM": llama.weight_map,
    "Qwen3ForCausalLM": llama.weight_map,
    "MistralForCausalLM": llama.weight_map,
    "Phi3ForCausalLM": partial(llama.weight_map, fused=True),
    "Gemma3ForCausalLM": llama.weight_map,
    "MixtralForCausalLM": llama.weight_map,
    "Qwen2MoeForCausalLM": llama.weight_map,
    "Qwen3MoeForCausalLM": llama.weight_map,
    **dict.fromkeys(ENCODERS, bert.weight_map),
}
"""One entry for each of config.model.ARCHITECTURES."""


def build_model(config: ModelConfig, backend: ModelBackend, device: torch.device) -> DecoderModel:
    """The model with unfilled parameters; see `weights.loader.load_model` for a ready one."""
    return DecoderModel(config, backend, device)


def weight_map(config: ModelConfig) -> dict[str, WeightTarget]:
    """Checkpoint tensor name -> its place in the model, for the config's architecture."""
    return WEIGHT_MAPS[config.architecture](config)
