"""Rotary embedding: what a config may ask for, against transformers, and what is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.config.model import ModelConfig
from octavo.config.rope import RopeConfig
from octavo.errors import ConfigError, ModelLoadError
from octavo.layers.rotary import RotaryEmbedding, inverse_frequencies, pair_halves
from tests.cpu.paged import assert_close, assert_same_bits, settings

CPU = torch.device("cpu")
ORIGINAL = {"original_max_position_embeddings": 512}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"factor": 4.0, **ORIGINAL}
MSCALE = {"mscale": 0.707, "mscale_all_dim": 1.0}
LONGROPE = {
    "short_factor": [1.0 + i / 32 for i in range(32)],
    "long_factor": [1.0 + i for i in range(32)],
    **ORIGINAL,
}
# (kind, its parameters, rope theta)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 2.5}),
    "dynamic": ("dynamic", {"factor": 3.0}),
    "llama3": ("llama3", LLAMA3),
    "yarn": ("yarn", YARN),
    "yarn_no_original": ("yarn", {"factor": 4.0}),
    "yarn_mscale": ("yarn", {**YARN, **MSCALE}),
    "yarn_one_mscale": ("yarn", {**YARN, "mscale": 0.707}),
    "yarn_attention": ("yarn", {**YARN, **MSCALE, "attention_factor": 0.75}),
    "yarn_betas": ("yarn", {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": True}),
    "yarn_not_truncated": ("yarn", {**YARN, "truncate": False}),
    "yarn_one_border": ("yarn", {**YARN, "beta_fast": 4, "beta_slow": 4, "truncate": False}),
    "longrope": ("longrope", LONGROPE),
    "longrope_factor": ("longrope", {**LONGROPE, "factor": 16.0}),
    "longrope_attention": ("longrope", {**LONGROPE, "attention_factor": 1.25}),
}


def read(**changes: Any) -> ModelConfig:
    shape = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = settings(**{**shape, "max_position_embeddings": 4096, **changes})
    return ModelConfig.from_hf(config, Path("x"), "dummy")


def expected(kind: str, parameters: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    """transformers' frequencies and attention factor for a text of that many tokens."""
    if kind == "default":
        return 1.0 / 5000.0 ** (torch.arange(0, 64, 2, dtype=torch.int64).float() / 64), 1.0
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
    return frequencies, float(factor)


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters", "both"])
@pytest.mark.parametrize("name", KINDS)
def test_w08_frequencies_equal_transformers(name: str, spelling: str) -> None:
    """W08: each kind of rope scaling in each spelling, against transformers' own functions."""
    kind, parameters = KINDS[name]
    if spelling == "rope_parameters":
        section = {"rope_type": kind, "rope_theta": 5000.0, **parameters}
        config = read(rope_parameters=section, rope_theta=None)
    else:
        keys = ("type", "rope_type") if spelling == "both" else (spelling,)
        section = dict.fromkeys(keys, kind) | parameters
        config = read(rope_scaling=section, rope_theta=5000.0)
    rope = config.rope
    frequencies, factor = expected(kind, parameters, config.max_position_embeddings)
    assert rope.kind == kind
    assert_close(inverse_frequencies(rope, 64), frequencies, 1e-7)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    if kind == "default":
        assert read(rope_scaling=None, rope_theta=5000.0).rope == rope
    rotary = RotaryEmbedding(rope, 64, 100, CPU)
    angles = torch.outer(torch.arange(100).double(), frequencies.double())
    assert_close(rotary.cos, angles.cos() * factor, 1e-5)
    assert_close(rotary.sin, angles.sin() * factor, 1e-5)


def test_dynamic_is_fixed_for_the_longest_context() -> None:
    """Scaled also for short texts, so that no token's frequencies depend on what ran before."""
    config = read(rope_scaling={"type": "dynamic", "factor": 3.0}, rope_theta=5000.0)
    assert config.max_position_embeddings == 3 * 4096
    for longest in (10, 5000):
        assert config.for_context(longest) == config
    plain = read(rope_scaling={"type": "dynamic", "factor": 1.0}, rope_theta=5000.0)
    assert_same_bits(inverse_frequencies(plain.rope, 64), expected("default", {}, 0)[0])


def test_yarn_extends_a_context_that_is_the_original_one() -> None:
    """As Qwen2.5's model card does it; DeepSeek's config names the extended context itself."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(rope_scaling=scaling).max_position_embeddings == 4 * 4096
    named = read(rope_scaling=scaling, max_position_embeddings=4 * 4096)
    assert named.max_position_embeddings == 4 * 4096
    assert named.rope == read(rope_scaling=scaling).rope


def test_longrope_factors_are_those_of_the_longest_request() -> None:
    """Long ones beyond the original context, for all positions; and the model's own by default."""
    config = read(rope_scaling={"type": "su", **LONGROPE}, rope_theta=5000.0)
    assert config.rope.kind == "longrope"
    for longest in (512, 513):
        rope = config.for_context(longest).rope
        frequencies, factor = expected("longrope", LONGROPE, longest)
        assert_close(inverse_frequencies(rope, 64), frequencies, 1e-7)
        assert rope.attention_factor == factor
    assert config.for_context(4096) == config
    assert config.for_context(512).rope.frequency_divisors == tuple(LONGROPE["short_factor"])


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["foo", "proportional", 3, ["linear"]])
def test_w08_unknown_rope_kind_is_refused(kind: object, key: str) -> None:
    """W08: what is not implemented refuses to start and lists what is."""
    with pytest.raises(ModelLoadError, match=r"rope_scaling.*supported: default, linear, dynamic"):
        read(rope_scaling={key: kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "linear", "rope_type": "llama3", "factor": 2.0}, "disagree"),
        ({"type": "linear"}, "factor: missing"),
        ({"factor": 2.0}, "kind None"),
        ({"rope_type": "linear", "factor": "2"}, "factor: '2' is not a number"),
        ({"rope_type": "linear", "factor": math.nan}, "factor: nan"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "dynamic"}, "factor: missing"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor: 0.5 is below 1"),
        ({"rope_type": "dynamic", "factor": 1e38}, "factor: .* float32"),
        ({"rope_type": "dynamic", "factor": 1e5}, "max_position_embeddings: 409600000 is more"),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 3e38}, "factor: .* float32"),
        ({"rope_type": "yarn", **YARN, "factor": 0.5}, "factor: 0.5 is below 1"),
        ({"rope_type": "yarn", **YARN, "beta_fast": 0.5}, "beta_fast: 0.5 is below beta_slow"),
        ({"rope_type": "yarn", **YARN, "rope_theta": 1.0}, "rope_theta: 1.0 is not above 1"),
        ({"rope_type": "yarn", **YARN, "truncate": "no"}, "truncate: 'no' is not true"),
        ({"rope_type": "yarn", **YARN, "mscale": 1, "mscale_all_dim": 0}, "mscale_all_dim: 0"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 32}, "short_factor: missing"),
        ({"rope_type": "longrope", **LONGROPE, "long_factor": [1.0] * 31}, "list of 32 numbers"),
        ({"rope_type": "longrope", **LONGROPE, "long_factor": [0.0] * 32}, "long_factor: 0.0"),
        ({"rope_type": "longrope", **LONGROPE, "short_factor": ["1"] * 32}, "short_factor: '1'"),
        ({"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 1}, "below 2"),
        ("linear", "not an object"),
    ],
)
def test_w08_bad_rope_scaling_is_refused_by_name(scaling: object, words: str) -> None:
    """W08: keys that disagree, are missing, are unknown or are no numbers."""
    with pytest.raises((ConfigError, ModelLoadError), match=words):
        read(rope_scaling=scaling)


def test_rotary_rotates_halves() -> None:
    """Pair (i, i + 32) by position * frequency i; position 0 changes nothing."""
    rotary = RotaryEmbedding(RopeConfig(1e4), 64, 100, CPU)
    x = torch.randn(3, 2, 64)
    out = rotary(x, rotary.tables(torch.tensor([0, 1, 99])))
    assert_same_bits(out[0], x[0])
    for row, position in ((1, 1), (2, 99)):
        angle = position / 1e4 ** (torch.arange(32).double() / 32)
        first, second = x[row].double().chunk(2, -1)
        turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
        assert_close(out[row], torch.cat((turned.real, turned.imag), -1), 1e-5)


def test_what_is_not_rotated_passes_through() -> None:
    """24 of 32 dimensions, in the order that the layer puts them: as the first 24 rotated alone."""
    config = RopeConfig(1e4, partial_rotary_factor=0.75, attention_factor=1.5)
    order = pair_halves(32, config.rotary_dim(32))
    assert sorted(order.tolist()) == list(range(32))
    rotary, whole = (
        RotaryEmbedding(rope, size, 100, CPU)
        for rope, size in ((config, 32), (RopeConfig(1e4, attention_factor=1.5), 24))
    )
    positions, x = torch.tensor([3, 70]), torch.randn(2, 5, 32)
    out = torch.empty_like(x)
    out[..., order] = rotary(x[..., order], rotary.tables(positions))
    assert_same_bits(out[..., 24:], x[..., 24:])
    assert_same_bits(out[..., :24], whole(x[..., :24], whole.tables(positions)))
