"""Norm, activation, rotary embedding and embedding against plain formulas, and row invariance."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.config.model import ModelConfig, RopeConfig
from octavo.errors import ConfigError, ModelLoadError
from octavo.layers.activation import silu_and_mul
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding, inverse_frequencies
from tests.cpu.paged import assert_close, assert_same_bits, settings

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def norm(size: int, dtype: torch.dtype) -> RMSNorm:
    layer = RMSNorm(size, 1e-5, dtype, CPU)
    layer.weight.data.copy_(torch.linspace(0.5, 1.5, size))
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_first(dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, 60).to(dtype), torch.randn(7, 60).to(dtype)
    layer = norm(60, dtype)
    normed, added = layer(x, residual)
    assert_same_bits(added, x + residual)
    wide = added.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight.double()
    assert_close(normed, expected, 2e-6 if dtype == torch.float32 else 3e-2)
    alone, same = layer(added)
    assert_same_bits(alone, normed)
    assert same is added


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(5, 122).mul(4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert_close(silu_and_mul(x), F.silu(gate) * up, 1e-4 if dtype == torch.float32 else 0.5)
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], dtype=dtype)
    assert silu_and_mul(extreme).tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [60, 96, 1536])
def test_rows_do_not_depend_on_their_place(size: int, dtype: torch.dtype, threads: int) -> None:
    """torch's vector loops end in scalar ones; where they end must not show in the bits.

    F.silu fails this (its scalar loop has another exp), which is why it is not used.
    """
    x = torch.randn(301, 2 * size).to(dtype)
    layer = norm(2 * size, dtype)
    rotary = RotaryEmbedding(RopeConfig(1e4), 2 * size, 400, CPU)

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        tables = rotary.tables(torch.full((len(rows),), 77))
        return rotary(rows[:, None], tables)[:, 0]

    operations: list[Callable[[torch.Tensor], torch.Tensor]] = [
        silu_and_mul,
        lambda rows: layer(rows, rows)[0],
        rotate,
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for operation in operations:
            expected = operation(x)
            for rows in (slice(0, 1), slice(3, 10), slice(300, 301), slice(130, 301)):
                assert_same_bits(operation(x[rows]), expected[rows])
    finally:
        torch.set_num_threads(before)


def hf_config(**changes: Any) -> transformers.LlamaConfig:
    base = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 4096}
    return transformers.LlamaConfig(**base, **changes)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "llama3": LLAMA3,
}


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_w08_frequencies_equal_transformers(kind: str, spelling: str) -> None:
    """W08: each kind of rope scaling in each spelling, against transformers' own functions."""
    parameters = {"rope_type": kind, "rope_theta": 5000.0, **KINDS[kind]}
    reference = hf_config(rope_parameters=parameters)
    if kind == "default":
        exponents = torch.arange(0, 64, 2, dtype=torch.int64).float() / 64
        expected = 1.0 / 5000.0**exponents
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](reference, CPU)
        assert factor == 1.0
    if spelling == "rope_parameters":
        config = settings(rope_parameters=parameters, rope_theta=None)
    else:
        keys = ("type", "rope_type") if spelling == "both" else (spelling,)
        scaling = dict.fromkeys(keys, kind) | KINDS[kind]
        config = settings(rope_scaling=scaling, rope_theta=5000.0)
    rope = ModelConfig.from_hf(config, Path("x"), "dummy").rope
    assert_close(inverse_frequencies(rope, 64), expected, 1e-7)
    if kind == "default":
        no_scaling = settings(rope_scaling=None, rope_theta=5000.0)
        assert ModelConfig.from_hf(no_scaling, Path("x"), "dummy").rope == rope


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["foo", "yarn", "dynamic", "longrope", 3, ["linear"]])
def test_w08_unknown_rope_kind_is_refused(kind: object, key: str) -> None:
    """W08: what is not implemented refuses to start and lists what is."""
    with pytest.raises(ModelLoadError, match=r"rope_scaling.*supported: default, linear, llama3"):
        ModelConfig.from_hf(settings(rope_scaling={key: kind, "factor": 2.0}), Path("x"), "dummy")


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "linear", "rope_type": "llama3", "factor": 2.0}, "disagree"),
        ({"type": "linear"}, "factor: missing"),
        ({"factor": 2.0}, "kind None"),
        ({"rope_type": "linear", "factor": "2"}, "factor: '2' is not a number"),
        ({"rope_type": "linear", "factor": math.nan}, "factor: nan"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
        ("linear", "not an object"),
    ],
)
def test_w08_bad_rope_scaling_is_refused_by_name(scaling: object, words: str) -> None:
    """W08: keys that disagree, are missing or are no numbers."""
    with pytest.raises((ConfigError, ModelLoadError), match=words):
        ModelConfig.from_hf(settings(rope_scaling=scaling), Path("x"), "dummy")


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


@pytest.mark.parametrize("tied", [True, False])
def test_lm_head_tied_or_not(tied: bool) -> None:
    embedding = Embedding(131, 64, torch.float32, CPU)
    embedding.weight.data.normal_()
    head = LMHead(131, 64, torch.float32, CPU, embedding if tied else None)
    assert [name for name, _ in head.named_parameters()] == ([] if tied else ["weight"])
    if head.weight is not None:
        head.weight.data.copy_(-embedding.weight)
    head.finalize("tiled")
    hidden = embedding(torch.tensor([5, 130]))
    expected = hidden @ embedding.weight.T * (1 if tied else -1)
    assert_close(head(hidden), expected, 1e-4)
    assert embedding.weight.shape == (131, 64)
