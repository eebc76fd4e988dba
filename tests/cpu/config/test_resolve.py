"""From settings and machine facts to a concrete config: every value has a reason, bad ones a name."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine import EngineArgs, EngineConfig
from octavo.config.model import ModelConfig
from octavo.config.moe import MoEConfig
from octavo.config.resolve import (
    DeviceFacts,
    engine_share,
    estimate_pool,
    finalise,
    make_args,
    resolve,
    size_kv_pool,
)
from octavo.config.rope import RopeConfig
from octavo.errors import ConfigError

FACTS = DeviceFacts("cpu", "test", num_threads=2, available_bytes=8 << 30)
MODEL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
    Path("model"),
    "dummy",
)
BLOCK_BYTES = MODEL.num_layers * MODEL.kv_cache_spec(16).block_bytes


def resolved(**settings: Any) -> EngineConfig:
    return resolve(make_args({"model": "model", **settings}), MODEL, FACTS)


def test_every_decision_has_a_value_and_a_reason() -> None:
    config = resolved(max_num_seqs=4, block_size=32)
    reasons = {decision.name: decision.reason for decision in config.decisions}
    assert all(reasons.values())
    assert reasons["max_num_seqs"] == reasons["block_size"] == "as given"
    assert reasons["max_model_len"] == "the model's context"
    assert reasons["enable_prefix_caching"] == "the default"
    assert len(reasons) == len(config.decisions)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0),
        ("max_model_len", 4097),
        ("max_num_seqs", 0),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", True),
        ("max_num_seqs", 10**30),
        ("max_num_seqs", 10**9),
        ("block_size", 10**30),
        ("block_size", 10**9),
        ("block_size", 4097),
        ("max_num_batched_tokens", 3),
        ("long_prefill_token_threshold", -1),
        ("block_size", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", float("nan")),
        ("kv_cache_memory_bytes", 0),
        ("num_gpu_blocks_override", 1),
        ("max_logprobs", -2),
        ("seed", "zero"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("scheduling_policy", "lifo"),
        ("load_format", "pickle"),
        ("enable_prefix_caching", 1),
        ("async_scheduling", "yes"),
        ("tokenizer", 3),
        ("model", None),
    ],
)
def test_bad_value_names_its_setting(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        resolved(**{name: value})


def test_longrope_factors_follow_the_longest_request() -> None:
    """Other kinds do not ask how long a request may be."""
    rope = RopeConfig(
        1e4,
        "longrope",
        original_max_position_embeddings=1000,
        short_factor=(1.0,) * 8,
        long_factor=(2.0,) * 8,
    )
    model = dataclasses.replace(MODEL, rope=rope)
    for max_model_len, factor, word in (
        (None, 2.0, "long"),
        (1001, 2.0, "long"),
        (1000, 1.0, "short"),
    ):
        args = make_args({"model": "model", "max_model_len": max_model_len})
        config = resolve(args, model, FACTS)
        assert config.model.rope.frequency_divisors == (factor,) * 8
        [decision] = [one for one in config.decisions if one.name == "longrope_factors"]
        assert decision.value == word
        assert "original context of 1000" in decision.reason
    assert resolved(max_model_len=100).model == MODEL


def test_unknown_setting_is_refused_and_the_known_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"enable_prefix_cachin;.*enable_prefix_caching"):
        resolved(enable_prefix_cachin=True)


def test_every_setting_is_read_by_something() -> None:
    """An option that nothing reads would be accepted and ignored."""
    package = Path(__file__).resolve().parents[3] / "src" / "octavo"
    text = "".join(path.read_text() for path in package.rglob("*.py") if path.name != "engine.py")
    for field in dataclasses.fields(EngineArgs):
        assert f"args.{field.name}" in text or f'"{field.name}"' in text, field.name


def test_pool_is_half_of_free_memory_up_to_4_gib_and_what_is_useful() -> None:
    config = resolved(max_num_seqs=256)
    assert size_kv_pool(config, BLOCK_BYTES, 1 << 30)[0] == (1 << 29) // BLOCK_BYTES
    blocks, decision = size_kv_pool(resolved(max_num_seqs=2), BLOCK_BYTES, 64 << 30)
    assert blocks == 2 * 256 + 1
    assert "all that" in decision.reason


def test_pool_by_share_bytes_or_number_of_blocks() -> None:
    many = {"max_num_seqs": 256}
    share = resolved(gpu_memory_utilization=0.25, **many)
    assert size_kv_pool(share, BLOCK_BYTES, 1 << 30)[0] == (1 << 28) // BLOCK_BYTES
    fixed = resolved(kv_cache_memory_bytes=100 * BLOCK_BYTES + 1, **many)
    assert size_kv_pool(fixed, BLOCK_BYTES, 1 << 30)[0] == 100
    assert size_kv_pool(resolved(num_gpu_blocks_override=7), BLOCK_BYTES, 1 << 20)[0] == 7
    with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
        size_kv_pool(resolved(num_gpu_blocks_override=10**9), BLOCK_BYTES, 1 << 30)


def test_no_room_says_what_would_be_needed() -> None:
    with pytest.raises(ConfigError, match=f"{BLOCK_BYTES} bytes"):
        size_kv_pool(resolved(), BLOCK_BYTES, BLOCK_BYTES)


def test_context_limit_follows_the_pool() -> None:
    """One source of truth (case P03)."""
    config = resolved(num_gpu_blocks_override=9)
    final = finalise(config, *size_kv_pool(config, BLOCK_BYTES, 1 << 30))
    assert final.scheduler.max_model_len == 128
    assert config.scheduler.max_model_len == 4096
    assert [d.value for d in final.decisions if d.name == "max_model_len"] == ["128"]
    asked = resolved(num_gpu_blocks_override=9, max_model_len=129)
    with pytest.raises(ConfigError, match="max_model_len=129"):
        finalise(asked, *size_kv_pool(asked, BLOCK_BYTES, 1 << 30))


def test_estimate_leaves_room_for_the_weights() -> None:
    config = resolved(max_num_seqs=256)
    least = MODEL.weight_bytes() + 8 * BLOCK_BYTES
    assert estimate_pool(config, replace(FACTS, available_bytes=least))[0] == 4


H200 = DeviceFacts("cuda", "H200", 16, available_bytes=130 << 30, total_bytes=140 << 30)
WIDE = replace(MODEL, num_heads=1, num_kv_heads=1, head_dim=64, dtype="bfloat16")


def on_gpu(model: ModelConfig = WIDE, **settings: Any) -> EngineConfig:
    return resolve(make_args({"model": "m", **settings}), model, H200)


def test_gpu_defaults() -> None:
    config = on_gpu()
    assert (config.device, config.linear_backend, config.enforce_eager) == ("cuda", "fixed", False)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 8192)
    assert config.cache.gpu_memory_utilization == 0.92


def test_a_float32_checkpoint_runs_as_bfloat16_on_a_gpu() -> None:
    config = on_gpu(replace(WIDE, dtype="float32"))
    assert config.model.dtype == "bfloat16"
    [decision] = [one for one in config.decisions if one.name == "dtype"]
    assert decision.value == "bfloat16"


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        (replace(WIDE, dtype="float32"), {"dtype": "float32"}, "dtype='float32'"),
        (replace(WIDE, head_dim=80), {}, "head_dim=80"),
        (WIDE, {"block_size": 8}, "block_size=8"),
        (WIDE, {"linear_backend": "tiled"}, "linear_backend='tiled'"),
        (replace(WIDE, intermediate_size=1111), {}, "intermediate_size=1111"),
        (replace(WIDE, vocab_size=2**19 + 8), {}, "vocab_size=524296"),
        (
            replace(WIDE, moe=MoEConfig(8, 2, 100, renormalise=True)),
            {"linear_backend": "cublas"},
            "moe_intermediate_size=100",
        ),
    ],
)
def test_what_gpu_kernels_do_not_take_is_refused_by_name(
    model: ModelConfig, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        on_gpu(model, **settings)


def test_cublas_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="linear_backend='cublas'"):
        resolved(linear_backend="cublas")


def test_gpu_pool_takes_its_share_of_all_the_memory() -> None:
    """What others hold, and what is kept free, comes off; the pool is not cut to what requests use."""
    config = on_gpu(gpu_memory_utilization=0.5, max_num_seqs=1, max_model_len=64)
    assert engine_share(config, H200) == 60 << 30
    block = WIDE.kv_cache_spec(16).block_bytes * WIDE.num_layers
    assert estimate_pool(config, H200)[0] == ((60 << 30) - WIDE.weight_bytes()) // block


def test_a_cache_larger_than_the_memory_is_refused() -> None:
    config = on_gpu(kv_cache_memory_bytes=500 << 30)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        size_kv_pool(config, 1 << 20, 100 << 30)
    assert size_kv_pool(config, 1 << 20, 501 << 30)[0] == 500 << 10
