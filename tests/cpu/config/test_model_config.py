"""ModelConfig: every field checked and named, and the sizes it computes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine import EngineArgs
from octavo.config.gguf_metadata import hf_from_gguf
from octavo.config.model import ModelConfig
from octavo.errors import ConfigError, ModelLoadError
from octavo.models.registry import weight_map
from octavo.weights.checkpoint import load_model_config
from tests.cpu.paged import settings


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(settings(**changes), Path("folder"), "dummy")


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "architectures",
    ],
)
def test_missing_field_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: missing"):
        read(**{key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", -1),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", -1.0),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("dtype", "int4"),
        ("eos_token_id", "</s>"),
        ("eos_token_id", -1),
        ("eos_token_id", [[1]]),
        ("dtype", ["bfloat16"]),
        ("dtype", {"a": 1}),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", 1e300),
        ("rope_theta", 10**400),
        ("rope_scaling", [1]),
        ("hidden_size", 2**31),
        ("hidden_size", 10**4000),
        ("vocab_size", 10**13),
        ("intermediate_size", 10**400),
        ("head_dim", 1026),
        ("num_attention_heads", 514),
        ("num_hidden_layers", 4097),
        ("max_position_embeddings", 2**24 + 1),
    ],
)
def test_bad_value_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read(**{key: value})


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("value", [["bfloat16"], {"text": "bfloat16"}, 10**4000])
def test_a_dtype_of_the_wrong_kind_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        read(**{"dtype": None, name: value})


@pytest.mark.parametrize("key", ["factor", "rope_theta", "low_freq_factor", "high_freq_factor"])
@pytest.mark.parametrize("value", [10**400, "8", 0, float("inf"), [1]])
def test_bad_rope_numbers_are_named(key: str, value: object) -> None:
    good = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"rope_type": "llama3", "original_max_position_embeddings": 64, **good, key: value}
    with pytest.raises(ConfigError, match=f"rope_scaling: {key}"):
        read(rope_scaling=scaling)


GGUF = {
    "general.architecture": "llama",
    "llama.vocab_size": 9,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 16,
    "llama.block_count": 1,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 8,
    "llama.attention.key_length": 16,
}


def read_gguf(**changes: object) -> ModelConfig:
    hf = hf_from_gguf({**GGUF, **changes}, {}, Path("x"))
    return ModelConfig.from_hf(hf, Path("x"), "gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", ["llama"]),
        ("general.architecture", 10**4000),
        ("tokenizer.ggml.tokens", 5),
        ("tokenizer.ggml.eos_token_id", "x"),
        ("llama.rope.dimension_count", 12),
        ("llama.rope.scaling.type", ["linear"]),
    ],
)
def test_bad_gguf_metadata_is_named(key: str, value: object) -> None:
    read_gguf()
    field = {"tokenizer.ggml.eos_token_id": "eos_token_id", "llama.rope.scaling.type": "kind"}
    with pytest.raises((ConfigError, ModelLoadError), match=field.get(key, key)):
        read_gguf(**{key: value})


def test_yarn_in_gguf_metadata() -> None:
    """As llama.cpp's converter writes it; a key that we do not know is refused by name."""
    prefix = "llama.rope.scaling."
    said = {
        f"{prefix}type": "yarn",
        f"{prefix}factor": 4.0,
        f"{prefix}original_context_length": 8,
        f"{prefix}finetuned": True,
        f"{prefix}yarn_beta_fast": 16.0,
    }
    config = read_gguf(**said)
    hf = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16.0}
    assert config.rope == read(rope_scaling=hf).rope
    assert config.max_position_embeddings == 32
    with pytest.raises(ModelLoadError, match="yarn_log_multiplier"):
        read_gguf(**said, **{f"{prefix}yarn_log_multiplier": 0.1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["GPT2LMHeadModel"]),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("sliding_window", 4096),
        ("partial_rotary_factor", 0.5),
        ("num_local_experts", 8),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", "full_attention"),
    ],
)
def test_unsupported_feature_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=key):
        read(**{key: value})


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_qwen_window_counts_only_where_it_is_used(architecture: str) -> None:
    """As in the config.json of Qwen2.5: a window is named, and switched off."""
    named = {"architectures": [architecture], "sliding_window": 32768, "max_window_layers": 28}
    assert read(**named) == read(**named, use_sliding_window=False)
    assert read(**named, layer_types=["full_attention"] * 2).num_layers == 2
    with pytest.raises(ModelLoadError, match="use_sliding_window=True is not supported"):
        read(**named, use_sliding_window=True)


def mistral(**changes: Any) -> ModelConfig:
    return read(**{"architectures": ["MistralForCausalLM"], **changes})


def test_a_window_is_read_where_the_family_has_one() -> None:
    """Mistral's is 4,096 where the key is not there, as in transformers; null is none."""
    assert mistral(sliding_window=100).sliding_window == 100
    assert mistral(sliding_window=100, layer_types=["sliding_attention"] * 2).sliding_window == 100
    assert mistral(sliding_window=None).sliding_window is None
    assert mistral(sliding_window=None, layer_types=["full_attention"] * 2).num_layers == 2
    assert mistral(max_position_embeddings=32768).sliding_window == 4096
    assert read(architectures=["Phi3ForCausalLM"]).sliding_window is None
    assert read(architectures=["Phi3ForCausalLM"], sliding_window=47).sliding_window == 47


def test_a_window_as_long_as_the_context_is_none() -> None:
    """Phi-3-mini-128k names one of 262,144."""
    assert mistral(sliding_window=1024).sliding_window is None
    assert mistral(sliding_window=1023).sliding_window == 1023


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 0),
        ("sliding_window", "4096"),
        ("sliding_window", [4096]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", ["full_attention"] * 2),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("lm_head_bias", True),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_what_mistral_does_not_have_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=key):
        mistral(**{"sliding_window": 100, key: value})


@pytest.mark.parametrize("value", [0, 1.5, 0.05, 0.7, "x", 10**400])
@pytest.mark.parametrize("inner", [True, False])
def test_bad_partial_rotary_factors_are_named(value: object, inner: bool) -> None:
    """0.7 of 16 dimensions are 11, which make no pairs; 0.05 of them none at all."""
    key = {"partial_rotary_factor": value}
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        read(architectures=["Phi3ForCausalLM"], **({"rope_parameters": key} if inner else key))


PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
    "eos_token_id": 199999,
}


def test_phi4_mini() -> None:
    """Keys as in its config.json; 3.8 B parameters by the model card. Weight map and count agree."""
    config = read(**PHI4_MINI)
    assert config.num_parameters() == 3_836_021_760
    shapes = [target.shape for target in weight_map(config).values()]
    assert sum(math.prod(shape) for shape in shapes) == config.num_parameters()
    assert (config.sliding_window, config.rope.rotary_dim(128)) == (None, 96)
    assert config.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32, 4096)))
    assert config.rope.frequency_divisors == (2.0,) * 48
    assert config.for_context(4096).rope.frequency_divisors == (1.0,) * 48


def test_the_first_phi3_says_su_or_yarn_for_longrope() -> None:
    scaling = PHI4_MINI["rope_scaling"]
    assert isinstance(scaling, dict)
    for kind in ("su", "yarn"):
        assert read(**PHI4_MINI | {"rope_scaling": {**scaling, "type": kind}}) == read(**PHI4_MINI)
    both = {**scaling, "type": "su", "rope_type": "longrope"}
    assert read(**PHI4_MINI | {"rope_scaling": both}) == read(**PHI4_MINI)


@pytest.mark.parametrize(
    ("architecture", "qkv", "out", "mlp", "qk_norm"),
    [
        ("LlamaForCausalLM", True, True, True, False),
        ("Qwen2ForCausalLM", True, False, False, False),
        ("Qwen3ForCausalLM", True, True, False, True),
    ],
)
def test_biases_and_norms_of_each_architecture(
    architecture: str, qkv: bool, out: bool, mlp: bool, qk_norm: bool
) -> None:
    """With every key set; without them only Qwen2 has a bias. Weight map and count agree."""
    keys = {"attention_bias": True, "mlp_bias": True}
    config = read(architectures=[architecture], head_dim=32, **keys)
    found = (config.attention_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm)
    assert found == (qkv, out, mlp, qk_norm)
    plain = read(architectures=[architecture], head_dim=32)
    assert plain.attention_bias is (architecture == "Qwen2ForCausalLM")
    assert not plain.attention_out_bias
    for one in (config, plain):
        shapes = [target.shape for target in weight_map(one).values()]
        assert sum(math.prod(shape) for shape in shapes) == one.num_parameters()


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}


def test_sizes_of_qwen3_8b() -> None:
    """Counted by hand; the model card says 8.2 B, 6.95 B without embeddings."""
    config = read(**QWEN3_8B)
    matrices = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert config.num_parameters() == matrices + norms + 2 * 151936 * 4096 == 8_190_735_360
    assert config.weight_bytes() == 16_381_470_720
    assert config.kv_bytes_per_token() == 2 * 36 * 8 * 128 * 2
    assert config.flops_per_token(0) == 2 * (matrices + 151936 * 4096)
    assert config.flops_per_token(10) - config.flops_per_token(0) == 10 * 4 * 36 * 4096


def test_unsupported_architecture_lists_the_supported() -> None:
    with pytest.raises(ModelLoadError, match="supported: LlamaForCausalLM, Qwen2"):
        read(architectures=["GPT2LMHeadModel"])


def test_w09_head_dim_is_taken_as_given() -> None:
    """W09: hidden 60, heads 4, head_dim 32; the model itself runs in test_llama_tiny."""
    config = read(hidden_size=60, head_dim=32)
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (32, 4, 2)
    assert read(hidden_size=60, head_dim=None, num_attention_heads=2).head_dim == 30
    with pytest.raises(ConfigError, match="head_dim"):
        read(hidden_size=62, head_dim=None)


@pytest.mark.parametrize(
    "key", ["head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
)
@pytest.mark.parametrize("value", [[32, 64], {"0": 32}])
def test_w09_per_layer_variants_are_refused(key: str, value: object) -> None:
    """W09: layers that differ are refused clearly."""
    with pytest.raises(ConfigError, match=f"{key}: differs per layer"):
        read(**{key: value})


def test_dtype_from_the_checkpoint_unless_asked() -> None:
    assert read(dtype="bfloat16").dtype == "bfloat16"
    assert read(dtype=None, torch_dtype="float16").dtype == "float16"
    asked = ModelConfig.from_hf(settings(dtype="bfloat16"), Path("x"), "dummy", "float32")
    assert asked.dtype == "float32"


def test_eos_tokens_are_one_or_several(tmp_path: Path) -> None:
    """A list in config.json, and more in generation_config.json, as chat models have."""
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read(eos_token_id=[7, 9]).eos_token_ids == (7, 9)
    assert read(eos_token_id=None).eos_token_ids == ()
    (tmp_path / "config.json").write_text(json.dumps(settings(eos_token_id=[7, 9])))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 11]}')
    config = load_model_config(EngineArgs(str(tmp_path), load_format="dummy"))
    assert config.eos_token_ids == (7, 9, 11)


def test_sizes_of_smollm2(smollm2_path: Path) -> None:
    """The published numbers, and FLOPs counted by hand."""
    config = load_model_config(EngineArgs(str(smollm2_path)))
    assert config.dtype == "bfloat16"
    assert config.num_parameters() == 134_515_008
    assert config.weight_bytes() == 2 * 134_515_008
    assert config.kv_bytes_per_token() == 23_040
    spec = config.kv_cache_spec(16)
    assert 30 * spec.block_bytes == 16 * 23_040
    matrices = 30 * (576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536) + 49152 * 576
    assert config.flops_per_token(0) == 2 * matrices
    assert config.flops_per_token(100) - config.flops_per_token(0) == 100 * 4 * 30 * 576
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_config_module_needs_no_torch() -> None:
    """`octavo info` and the scheduler's tests start without it."""
    import subprocess
    import sys

    code = "import sys, octavo.config.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
