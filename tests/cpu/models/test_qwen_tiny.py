"""Small random Qwen2 and Qwen3 models against transformers, from safetensors and from GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.config.engine import EngineArgs
from octavo.weights.checkpoint import load_model_config
from octavo.weights.gguf import GGUFFile, iterate_tensors
from tests.cpu.models.helpers import check_chunks, check_logits, load, reference
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits
from tests.cpu.weights.helpers import save_gguf

LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}
# (family, what differs from the base)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"sliding_window": 8, "max_window_layers": 0}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2_rope": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_head_dim": ("Qwen3", {"hidden_size": 60, "head_dim": 32}),
    "qwen3_tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_biases": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3_linear": ("Qwen3", {"head_dim": 32, "rope_parameters": LINEAR}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """W09: Qwen3's heads are not hidden_size / num_heads wide."""
    family, changes = VARIANTS[name]
    check_logits(tmp_path, reference(tmp_path, family, **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_head_dim"])
def test_chunks_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    reference(tmp_path, family, **changes)
    check_chunks(tmp_path, dtype)


def test_qwen3_without_head_dim_has_that_of_transformers(tmp_path: Path) -> None:
    """The key left out of config.json: 128, not hidden_size / num_heads."""
    reference(tmp_path, "Qwen3", num_attention_heads=2, num_key_value_heads=1)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    assert content.pop("head_dim") == 128
    path.write_text(json.dumps(content))
    assert load(tmp_path).config.head_dim == 128


@pytest.mark.parametrize("name", ["qwen2", "qwen3_head_dim", "qwen3_tied"])
def test_f32_gguf_equals_its_safetensors(name: str, tmp_path: Path) -> None:
    """Every tensor and the logits: rows of q and k are in the same order, unlike Llama's."""
    family, changes = VARIANTS[name]
    reference(tmp_path, family, **changes)
    content = json.loads((tmp_path / "config.json").read_text())
    content["rope_theta"] = content["rope_parameters"]["rope_theta"]
    tensors = load_file(tmp_path / "model.safetensors")
    path = tmp_path / "model.gguf"
    save_gguf(path, content, tensors, architecture=family.lower())
    ours = load_model_config(EngineArgs(str(path)))
    theirs = load_model_config(EngineArgs(str(tmp_path)))
    assert ours.architecture == theirs.architecture
    assert ours.num_parameters() == theirs.num_parameters()
    loaded = dict(iterate_tensors(GGUFFile(path), ours))
    assert loaded.keys() == tensors.keys()
    for tensor_name, tensor in loaded.items():
        assert_same_bits(tensor, tensors[tensor_name])
    tokens = torch.randint(3, 131, (40,))
    logits = [PagedModel(config).step_from_empty(tokens) for config in (ours, theirs)]
    # rms_norm_eps passes through float32 in the file.
    assert_close(logits[0], logits[1], 1e-5)
