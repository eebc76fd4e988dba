"""The metadata of a GGUF file in the words of config.json, so that one reader checks both."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ModelLoadError, shown

NAMES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("gguf.toml").read_text("utf-8")
)
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hf_from_gguf(
    metadata: Mapping[str, Any], tensor_types: Mapping[str, str], path: Path
) -> dict[str, Any]:
    """The config.json that would say what the metadata say; missing values are None.

    tensor_types: tensor name -> GGML type name ("Q4_1"); they decide tied embeddings and the dtype
    (quantised: bfloat16). Raises ModelLoadError for what no config.json says.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in NAMES["architectures"]:
        supported = f"not supported (supported: {', '.join(NAMES['architectures'])})"
        raise ModelLoadError(f"{path}: general.architecture={shown(name)} is {supported}")

    def get(key: str) -> Any:
        return metadata.get(f"{name}.{key}")

    architecture = NAMES["architectures"][name]
    if name == "llama" and get("expert_count"):
        architecture = "MixtralForCausalLM"
    rotated = get("rope.dimension_count")
    head_dim = metadata.get(f"{name}.attention.key_length", rotated)
    if rotated is not None and rotated != head_dim:
        key = f"{name}.rope.dimension_count"
        raise ModelLoadError(f"{path}: {key}={shown(rotated)} is not head_dim")
    quantised = not set(tensor_types.values()) <= set(_FLOATS)
    stored = _FLOATS.get(tensor_types.get("token_embd.weight", "F32"), "bfloat16")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise ModelLoadError(f"{path}: tokenizer.ggml.tokens: {shown(tokens)} is not a list")
    config = {key: get(theirs) for key, theirs in NAMES["keys"].items()}
    config |= {
        "architectures": [architecture],
        "vocab_size": metadata.get(f"{name}.vocab_size", len(tokens) or None),
        "head_dim": head_dim,
        "rope_scaling": _rope_scaling(metadata, f"{name}.rope.scaling."),
        "tie_word_embeddings": "output.weight" not in tensor_types,
        "attention_bias": "blk.0.attn_q.bias" in tensor_types,
        "mlp_bias": "blk.0.ffn_up.bias" in tensor_types,
        "norm_topk_prob": name == "qwen3moe",  # as in llama.cpp: no key says so
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16" if quantised else stored,
    }
    if name == "gemma3":
        # As in llama.cpp: the 27B model alone scales by hidden_size / num_heads, and no key says so.
        config["query_pre_attn_scalar"] = 168 if get("block_count") == 62 else head_dim
        config["sliding_window"] = get("attention.sliding_window")
        config["rope_local_base_freq"] = get("rope.freq_base_swa")
    return config


def _rope_scaling(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """All keys under the prefix: those we do not know are refused by whoever reads the section."""
    found = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if found.get("type") in (None, "none"):
        return None
    return {NAMES["rope_scaling"].get(key, key): value for key, value in found.items()}
