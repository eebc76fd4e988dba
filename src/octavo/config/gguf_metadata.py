"""The metadata of a GGUF file in the words of config.json, so that one reader checks both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ModelLoadError, shown

_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_GGUF_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hf_from_gguf(
    metadata: Mapping[str, Any], tensor_types: Mapping[str, str], path: Path
) -> dict[str, Any]:
    """The config.json that would say what the metadata say; missing values are None.

    tensor_types: as for `ModelConfig.from_gguf`. Raises ModelLoadError for what no config.json says.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _GGUF_ARCHITECTURES:
        supported = f"not supported (supported: {', '.join(_GGUF_ARCHITECTURES)})"
        raise ModelLoadError(f"{path}: general.architecture={shown(name)} is {supported}")

    def get(key: str) -> Any:
        return metadata.get(f"{name}.{key}")

    architecture = _GGUF_ARCHITECTURES[name]
    if name == "llama" and get("expert_count"):
        architecture = "MixtralForCausalLM"
    rotated = get("rope.dimension_count")
    head_dim = metadata.get(f"{name}.attention.key_length", rotated)
    if rotated is not None and rotated != head_dim:
        key = f"{name}.rope.dimension_count"
        raise ModelLoadError(f"{path}: {key}={shown(rotated)} is not head_dim")
    quantised = not set(tensor_types.values()) <= set(_GGUF_FLOATS)
    stored = _GGUF_FLOATS.get(tensor_types.get("token_embd.weight", "F32"), "bfloat16")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise ModelLoadError(f"{path}: tokenizer.ggml.tokens: {shown(tokens)} is not a list")
    return {
        "architectures": [architecture],
        "vocab_size": metadata.get(f"{name}.vocab_size", len(tokens) or None),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _gguf_rope_scaling(metadata, f"{name}.rope.scaling."),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensor_types,
        "attention_bias": "blk.0.attn_q.bias" in tensor_types,
        "mlp_bias": "blk.0.ffn_up.bias" in tensor_types,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16" if quantised else stored,
        **_family(name, get, head_dim),
    }


def _family(name: str, get: Callable[[str], Any], head_dim: Any) -> dict[str, Any]:
    """What only some families have."""
    if name == "gemma3":
        # As in llama.cpp: the 27B model alone scales by hidden_size / num_heads, and no key says so.
        large = get("block_count") == 62
        return {
            "sliding_window": get("attention.sliding_window"),
            "query_pre_attn_scalar": 168 if large else head_dim,
            "rope_local_base_freq": get("rope.freq_base_swa"),
        }
    return {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": get("expert_shared_feed_forward_length"),
        # As in llama.cpp: no key says so.
        "norm_topk_prob": name == "qwen3moe",
    }


def _gguf_rope_scaling(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """All keys under the prefix: those we do not know are refused by whoever reads the section."""
    names = {"original_context_length": "original_max_position_embeddings"}
    names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    found = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if found.get("type") in (None, "none"):
        return None
    return {names.get(key, key): value for key, value in found.items()}
