"""Small random Llamas of every shape against transformers, from safetensors folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.config.engine import EngineArgs
from octavo.config.model import ARCHITECTURES
from octavo.models.registry import WEIGHT_MAPS
from octavo.weights.checkpoint import load_model_config
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
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


def reference(folder: Path, **changes: Any) -> Any:
    """A random transformers model, saved into the folder, with biases and norms not trivial."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**BASE, **changes})
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: Any = "auto", block_size: int = 16) -> PagedModel:
    return PagedModel(load_model_config(EngineArgs(str(folder), dtype=dtype)), block_size)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """300 tokens (two splits of keys) in uneven chunks, fp32, within 1e-4. W09: head_dim."""
    model = reference(tmp_path, **VARIANTS[name])
    tokens = torch.randint(3, 131, (300,))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    ours = load(tmp_path)
    assert ours.config.dtype == "float32"
    assert ours.config.num_parameters() == sum(p.numel() for p in model.parameters())
    request = ours.add(300)
    parts = tokens.split([37, 200, 1, 1, 61])
    logits = torch.cat([ours.step({request: part})[request] for part in parts])
    assert_close(logits, expected, 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gqa", "head_dim", "wide_group", "biases"])
def test_chunks_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """Also for widths that fill no vector register (hidden 60) and block sizes 8 and 32."""
    reference(tmp_path, **VARIANTS[name])
    tokens = torch.randint(3, 131, (270,))
    expected = load(tmp_path, dtype).solo(tokens, 270)
    for block_size, chunk in ((8, 250), (16, 64), (32, 37)):
        assert_same_bits(load(tmp_path, dtype, block_size).solo(tokens, chunk), expected)
    assert_same_bits(load(tmp_path, dtype).solo(tokens[:60], 7), expected[:60])


def test_every_supported_architecture_has_a_weight_map() -> None:
    assert tuple(WEIGHT_MAPS) == ARCHITECTURES
