"""Engines on small random models and on SmolLM2 for the GPU tests, and what they compare."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo import LLM, SamplingParams
from octavo.config.model import ModelConfig
from octavo.models.registry import weight_map
from octavo.outputs import RequestOutput

VOCAB = 4096
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
LLAMA = {
    **QWEN,
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_theta": 1e4,
}
SHAPES = {"qwen": QWEN, "llama": LLAMA}
FAMILIES = {
    **SHAPES,
    # Windows that the texts outgrow, and factors for a context beyond the original one.
    "mistral": {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 23},
    "phi3": {
        **QWEN,
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": 40,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + i / 4 for i in range(48)],
        },
    },
    # Layers of two kinds in three KV groups, the last with one layer less.
    "gemma3": {
        **QWEN,
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 23,
        "sliding_window_pattern": 2,
    },
    # All experts for each token: a rounding that chose another one would leave nothing to compare.
    "qwen2_moe": {
        **LLAMA,
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 136,
        "shared_expert_intermediate_size": 256,
        "norm_topk_prob": True,
    },
}
QWEN3_MOE = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 20,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 136,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_ALL = {**FAMILIES, "qwen3_moe": QWEN3_MOE}


def model_folder(folder: Path, shape: str) -> Path:
    """A checkpoint with weights large enough that attention decides: dummies would hide errors."""
    path = folder / shape
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(_ALL[shape]))
    generator = torch.Generator().manual_seed(0)
    config = ModelConfig.from_hf(_ALL[shape], path, "safetensors")
    tensors = {}
    for name, target in weight_map(config).items():
        drawn = torch.randn(target.shape, generator=generator)
        is_norm = len(target.shape) == 1
        base = 0.0 if config.norm_unit_offset else 1.0
        tensors[name] = (base + 0.1 * drawn if is_norm else 0.08 * drawn).to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    return path


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[LLM]:
    """An LLM on the GPU that ends with every block and slot given back."""
    defaults: dict[str, Any] = {
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "num_gpu_blocks_override": 6000,
    }
    with LLM(str(model), **{**defaults, **settings}) as llm:
        yield llm
        core = llm.engine.core
        llm.engine.drain()
        core.scheduler.check_integrity()
        stats = core.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks


def token_prompts(lengths: Sequence[int], seed: int, vocab: int = VOCAB) -> list[dict[str, Any]]:
    """Random token ids of these lengths."""
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(1, vocab) for _ in range(n)]} for n in lengths]


def sampling(index: int, max_tokens: int = 24) -> SamplingParams:
    """Greedy and seeded requests in turn, with lengths that are known and scores."""
    common: dict[str, Any] = {
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,
    }
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, **common)
    if index % 4 == 1:
        return SamplingParams(temperature=0.8, seed=1000 + index, **common)
    return SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=1000 + index, **common)


def fingerprint(output: RequestOutput) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    """Tokens, and the fp32 bits of the score of each."""
    [completion] = output.outputs
    assert completion.error is None, completion.error
    assert completion.logprobs is not None
    scores = [
        entry[token].logprob
        for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    return tuple(completion.token_ids), tuple(struct.pack("f", score) for score in scores)
