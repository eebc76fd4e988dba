"""Gemma 3 configs: their defaults, which layers see a window only, and a rope for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.config.fields import FieldReader
from octavo.config.rope import RopeConfig, read_rope
from octavo.errors import ModelLoadError, shown

GEMMA3 = "Gemma3ForCausalLM"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _global_layers(read: FieldReader, num_layers: int) -> tuple[int, ...]:
    """Layers that see all keys: named by layer_types, or every sliding_window_pattern-th."""
    kinds = read.config.get("layer_types")
    if kinds is None:
        pattern = read.count("sliding_window_pattern", default=6)
        return tuple(range(pattern - 1, num_layers, pattern))
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise ModelLoadError(f"{read.where}: layer_types={shown(kinds)} is not supported")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)


def read_ropes(read: FieldReader, head_dim: int, declared: int) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers that see all keys and of those with a window; see `read_rope`."""
    sections = read.config.get("rope_parameters") or {}
    if not isinstance(sections, Mapping):
        raise read.error("rope_parameters", f"{shown(sections)} is not an object")
    older: dict[str, dict[str, Any]] = {  # one rope_scaling, which is not that of the windows
        _FULL: {"rope_theta": read.number("rope_theta", 1e6)},
        _SLIDING: {"rope_theta": read.number("rope_local_base_freq", 1e4), "rope_scaling": None},
    }

    def rope(kind: str) -> RopeConfig:
        config = {**read.config, **older[kind], "rope_parameters": sections.get(kind)}
        inner = FieldReader(config, read.where)
        return read_rope(config, inner, GEMMA3, head_dim, declared)

    return rope(_FULL), rope(_SLIDING)


def read_family(read: FieldReader, num_layers: int, hidden_size: int) -> dict[str, Any]:
    """Fields of ModelConfig that other families leave alone, but for the ropes."""
    return {
        "global_layers": _global_layers(read, num_layers),
        "query_pre_attn_scalar": read.number("query_pre_attn_scalar"),
        **dict.fromkeys(("gelu", "post_norms", "norm_unit_offset"), True),
        "embedding_scale": hidden_size**0.5,
    }
