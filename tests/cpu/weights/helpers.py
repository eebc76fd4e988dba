"""Small checkpoints on disk: a random Llama as safetensors, and the same weights as GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from octavo.config.model import ModelConfig
from octavo.models.registry import weight_map
from tests.cpu.engine.helpers import BYTE_CHARS
from tests.cpu.paged import settings


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the names and of the shapes that the config asks for."""
    generator = torch.Generator().manual_seed(seed)
    targets = weight_map(ModelConfig.from_hf(config, Path("x"), "safetensors"))
    return {name: torch.randn(t.shape, generator=generator) for name, t in targets.items()}


def save_folder(folder: Path, shards: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    """A safetensors folder. With shards > 1, tensors are dealt out in turn and indexed."""
    config = settings(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = weights(config)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    index: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::shards]}
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    content = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return tensors


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


GEMMA_GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, architecture: str = "llama") -> str:
    """As llama.cpp's converter names it."""
    stem, kind = name.rsplit(".", 1)
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    names = GGUF_NAMES | (GEMMA_GGUF_NAMES if architecture == "gemma3" else {})
    return f"blk.{layer}.{names[rest]}.{kind}"


def permute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k of a Llama."""
    split = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)


def pack(data: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """The rows as blocks; where the package has no quantiser, random blocks with finite scales."""
    try:
        return gguf.quantize(data, kind)
    except NotImplementedError:
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (data.shape[0], data.shape[1] // per_block * block_bytes)
        # No float16 with bytes below 0x3C is NaN, infinite or 1 or more.
        return np.random.default_rng(kind.value).integers(0, 0x3C, shape, np.uint8)


def save_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_freqs: list[float] | None = None,
    architecture: str = "llama",
    counts: Mapping[str, int] = {},
) -> None:
    """Write the weights as llama.cpp's converter would; matrices of type `kind`, norms F32.

    counts: more metadata, by their keys under the architecture's.
    """
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture == "gemma3":
        tensors = {n: t + 1 if "norm" in n else t for n, t in tensors.items()}
    for key, value in counts.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in tensors.items():
        if ".q_proj." in name and architecture == "llama":
            tensor = permute(tensor, config["num_attention_heads"])
        if ".k_proj." in name and architecture == "llama":
            tensor = permute(tensor, config["num_key_value_heads"])
        data = np.ascontiguousarray(tensor.numpy())
        if tensor.dim() == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name, architecture), data)
        else:
            packed = pack(data, kind)
            writer.add_tensor(gguf_name(name, architecture), packed, raw_dtype=kind)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WORDS = ["<|end|>", "he", "user"]


def save_small_gguf(path: Path, kind: str = "gpt2") -> None:
    """A tiny Llama with its tokenizer (of that ggml kind), its chat template and rope divisors."""
    config = settings(num_hidden_layers=1, vocab_size=256 + len(WORDS))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    spelled = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "llama" else BYTE_CHARS.values()
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*spelled, *WORDS])
    if kind == "llama":
        writer.add_token_scores([0.0] * 257 + [-1.0, -2.0])
        writer.add_add_space_prefix(True)
    else:
        writer.add_token_merges(["h e"])
    writer.add_token_types([6 if kind == "llama" else 1] * 256 + [3, 1, 4])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in weights(config).items():
        data = np.ascontiguousarray(tensor.numpy())
        if data.ndim == 2 and "down" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), data)
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
