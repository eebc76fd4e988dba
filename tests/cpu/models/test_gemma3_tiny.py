"""Small random Gemma 3s against transformers: local and global layers, two ropes, both spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.model import ModelConfig
from octavo.errors import ConfigError, ModelLoadError
from tests.cpu.models.helpers import BASE, check_chunks, check_logits, load, reference

LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "every_third_global": {"sliding_window": 40, "sliding_window_pattern": 3},
    "named_layers": {
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
        "query_pre_attn_scalar": 24,
    },
    "linear_rope": {"sliding_window": 100, "sliding_window_pattern": 2, "rope_parameters": LINEAR},
    "window_beyond_the_context": {"sliding_window": 2000, "sliding_window_pattern": 2},
    "all_local": {"sliding_window": 30, "num_hidden_layers": 2},
}


def gemma(folder: Path, name: str) -> Any:
    changes = {"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32}
    return reference(folder, "Gemma3Text:Gemma3", **{**changes, **VARIANTS[name]})


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(tmp_path, gemma(tmp_path, name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_change_no_bit(dtype: str, tmp_path: Path) -> None:
    gemma(tmp_path, "every_third_global")
    check_chunks(tmp_path, dtype)


def test_older_spelling_is_the_same_model(tmp_path: Path) -> None:
    """rope_theta, rope_local_base_freq and rope_scaling, as the first checkpoints have them."""
    gemma(tmp_path, "linear_rope")
    written = load(tmp_path).config
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["rope_parameters"], content["layer_types"], content["tie_word_embeddings"]
    content |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}
    path.write_text(json.dumps(content | {"rope_scaling": {"type": "linear", "factor": 8.0}}))
    assert load(tmp_path).config == written
    assert written.layer_groups() == ((1, 3, 5), (0, 2, 4))
    assert [written.window(layer) for layer in range(3)] == [100, None, 100]


def test_groups_have_as_many_layers_as_the_rarer_kind() -> None:
    """26 layers, 4 of them global: 22 local ones in groups of 4, the last with 2."""
    config = read(num_hidden_layers=26)
    assert config.global_layers == (5, 11, 17, 23)
    assert [len(group) for group in config.layer_groups()] == [4, 4, 4, 4, 4, 4, 2]
    assert sorted(sum(config.layer_groups(), ())) == list(range(26))
    assert read(num_hidden_layers=5).layer_groups() == (tuple(range(5)),)


def read(**changes: Any) -> ModelConfig:
    content = {**BASE, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, **changes}
    return ModelConfig.from_hf(content, Path("folder"), "dummy")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("use_bidirectional_attention", True),
        ("hidden_activation", "gelu"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"] * 3),
        ("layer_types", 3),
        ("rope_parameters", [1]),
        ("rope_parameters", {"full_attention": {"rope_type": "alibi"}}),
        ("sliding_window_pattern", 0),
        ("query_pre_attn_scalar", -1),
    ],
)
def test_what_is_not_built_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=key):
        read(**{key: value})


def test_greedy_text_equals_transformers(tmp_path: Path) -> None:
    model = gemma(tmp_path, "every_third_global")
    prompt = torch.randint(3, 131, (90,), generator=torch.Generator().manual_seed(3))
    expected = model.generate(prompt[None], max_new_tokens=32, do_sample=False, eos_token_id=None)
    ours, request = load(tmp_path), None
    request = ours.add(122)
    logits, text = ours.step({request: prompt})[request], []
    for _ in range(32):
        text.append(int(logits[-1].argmax()))
        logits = ours.step({request: torch.tensor(text[-1:])})[request]
    assert text == expected[0, 90:].tolist()
