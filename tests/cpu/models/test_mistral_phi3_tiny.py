"""Small random Mistrals and Phi-3s against transformers: windows, fused weights, rope kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.cpu.models.helpers import check_chunks, check_logits, load, reference
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.02 * i for i in range(pairs)],
        "long_factor": [1.0 + i for i in range(pairs)],
    }


def phi3(pairs: int = 8, original: int = 64, **changes: Any) -> dict[str, Any]:
    changes = {"rope_parameters": longrope(pairs), "pad_token_id": None, **changes}
    return {"eos_token_id": 2, "original_max_position_embeddings": original, **changes}


# (family, what differs from the base)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "window_1": ("Mistral", {"sliding_window": 1}),
    "window_7": ("Mistral", {"sliding_window": 7}),
    "window_100": ("Mistral", {"sliding_window": 100, "head_dim": 32}),
    "window_256": ("Mistral", {"sliding_window": 256}),
    "no_window": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "yarn": ("Mistral", {"sliding_window": 50, "rope_parameters": YARN}),
    "phi3": ("Phi3", phi3()),
    "phi3_default_rope": ("Phi3", phi3(rope_parameters={"rope_type": "default"})),
    "phi3_window": ("Phi3", phi3(sliding_window=60, num_key_value_heads=4)),
    "phi4_mini": (
        "Phi3",
        phi3(6, tie_word_embeddings=True)
        | {"rope_parameters": {**longrope(6), "partial_rotary_factor": 0.75}},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Texts of 300 tokens, more than the windows and the original contexts."""
    family, changes = VARIANTS[name]
    check_logits(tmp_path, reference(tmp_path, family, **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["window_7", "window_100", "phi3_window", "phi4_mini"])
def test_chunks_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    reference(tmp_path, family, **changes)
    check_chunks(tmp_path, dtype)


def test_batch_mates_change_no_bit(tmp_path: Path) -> None:
    """Decodes and chunks behind windows that begin in different splits of keys."""
    reference(tmp_path, "Mistral", sliding_window=40)
    model, tokens = load(tmp_path), torch.randint(3, 131, (600,))
    expected = model.solo(tokens, 600)
    model.reset(seed=1)
    requests = [model.add(600) for _ in range(4)]
    schedule = [(600, 520, 290, 30), (0, 1, 37, 1), (0, 1, 1, 300), (0, 9, 250, 1)]
    for counts in schedule:
        chunks = {
            request: tokens[model.computed[request] :][:count]
            for request, count in zip(requests, counts, strict=True)
            if count
        }
        starts = {request: model.computed[request] for request in chunks}
        for request, got in model.hidden_step(chunks).items():
            assert_same_bits(got, expected[starts[request] :][: len(got)])


def test_short_factors_where_no_request_outgrows_the_original_context(tmp_path: Path) -> None:
    model = reference(tmp_path, "Phi3", **phi3(original=512))
    tokens = torch.randint(3, 131, (300,))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    config = load(tmp_path).config
    assert_close(PagedModel(config.for_context(512)).step_from_empty(tokens), expected, 1e-4)
    wrong = PagedModel(config.for_context(513)).step_from_empty(tokens)
    assert (wrong - expected).abs().max() > 0.1


def test_dynamic_equals_transformers_at_its_longest_context(tmp_path: Path) -> None:
    """transformers' model with the frequencies it would have after 2,560 tokens."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5}
    model = reference(tmp_path, "Llama", rope_parameters=parameters)
    assert load(tmp_path).config.max_position_embeddings == 2560
    rotary = model.model.rotary_emb
    rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, seq_len=2560)
    rotary.max_seq_len_cached, rotary.original_max_seq_len = 2560, 0
    check_logits(tmp_path, model)


def test_yarn_llama_equals_transformers(tmp_path: Path) -> None:
    changes = {**YARN, "beta_fast": 8.0, "mscale": 0.7, "mscale_all_dim": 0.2, "truncate": False}
    check_logits(tmp_path, reference(tmp_path, "Llama", rope_parameters=changes))
