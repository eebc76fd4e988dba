"""Which architecture is built how."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from octavo.attention.groups import ModelBackend
from octavo.config.encoder import ENCODERS
from octavo.config.model import ARCHITECTURES, ModelConfig
from octavo.models import bert, llama
from octavo.models.decoder import DecoderModel, WeightTarget

WEIGHT_MAPS: dict[str, Callable[[ModelConfig], dict[str, WeightTarget]]] = {
    **dict.fromkeys(ARCHITECTURES, llama.weight_map),
    "Phi3ForCausalLM": partial(llama.weight_map, fused=True),
    **dict.fromkeys(ENCODERS, bert.weight_map),
}


def build_model(config: ModelConfig, backend: ModelBackend, device: torch.device) -> DecoderModel:
    """The model with unfilled parameters; see `weights.loader.load_model` for a ready one."""
    return DecoderModel(config, backend, device)


def weight_map(config: ModelConfig) -> dict[str, WeightTarget]:
    """Checkpoint tensor name -> its place in the model, for the config's architecture."""
    return WEIGHT_MAPS[config.architecture](config)
