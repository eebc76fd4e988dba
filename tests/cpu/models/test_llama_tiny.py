"""Small random Llamas of every shape against transformers, from safetensors folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config.model import ARCHITECTURES
from octavo.models.registry import WEIGHT_MAPS
from tests.cpu.models.helpers import check_chunks, check_logits, reference

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"hidden_size": 60, "head_dim": 32},
    "wide_group": {
        "hidden_size": 96,
        "num_attention_heads": 24,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}},
    "llama3": {"rope_parameters": LLAMA3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """W09: head_dim."""
    check_logits(tmp_path, reference(tmp_path, "Llama", **VARIANTS[name]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gqa", "head_dim", "wide_group", "biases"])
def test_chunks_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """Also for widths that fill no vector register (hidden 60) and block sizes 32 and 64."""
    reference(tmp_path, "Llama", **VARIANTS[name])
    check_chunks(tmp_path, dtype)


def test_every_supported_architecture_has_a_weight_map() -> None:
    assert tuple(WEIGHT_MAPS) == ARCHITECTURES
