"""Small random Mixtral, Qwen2-MoE and Qwen3-MoE models against transformers; and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.cli.info import describe
from octavo.config.engine import EngineArgs
from octavo.config.model import ModelConfig
from octavo.config.resolve import DeviceFacts
from octavo.errors import ConfigError, ModelLoadError
from octavo.weights.checkpoint import load_model_config
from octavo.weights.gguf import GGUFFile, iterate_tensors
from tests.cpu.models.helpers import check_chunks, check_logits, load, reference
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits
from tests.cpu.weights.helpers import save_gguf

MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
QWEN = {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 40}
SHARED = {"shared_expert_intermediate_size": 56}
# (family, what differs from the base)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral_window": ("Mixtral", {**MIXTRAL, "sliding_window": 50, "head_dim": 32}),
    "mixtral_one_expert": ("Mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen3": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True, "head_dim": 24}),
    "qwen3_plain_softmax": ("Qwen3Moe", {**QWEN, "tie_word_embeddings": True}),
    "qwen3_dense_layers": ("Qwen3Moe", {**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
    "qwen3_all_experts": ("Qwen3Moe", {**QWEN, "num_experts_per_tok": 12, "attention_bias": True}),
    "qwen2": ("Qwen2Moe", {**QWEN, **SHARED}),
    "qwen2_dense_layers": (
        "Qwen2Moe",
        {**QWEN, **SHARED, "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False},
    ),
}


def make(folder: Path, name: str) -> Any:
    family, changes = VARIANTS[name]
    return reference(folder, family, **changes)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """In uneven chunks; and greedy tokens, one at a time."""
    theirs = make(tmp_path, name)
    check_logits(tmp_path, theirs)
    prompt = torch.randint(3, 131, (9,))
    expected = theirs.generate(
        prompt[None], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 9:]
    ours, given, found = load(tmp_path), prompt, []
    request = ours.add(40)
    for _ in range(24):
        given = ours.step({request: given})[request][-1:].argmax(-1)
        found.append(int(given))
    assert found == expected.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral_window", "qwen3", "qwen2_dense_layers"])
def test_chunks_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    make(tmp_path, name)
    check_chunks(tmp_path, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "qwen2"])
def test_batch_mates_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """Mates that share experts, in other numbers at each step."""
    make(tmp_path, name)
    model, tokens = load(tmp_path, dtype), torch.randint(3, 131, (120,))
    expected = model.solo(tokens, 120)
    model.reset(seed=1)
    requests = [model.add(200) for _ in range(4)]
    for counts in ((60, 1, 0, 17), (1, 0, 1, 1), (37, 64, 2, 1), (0, 1, 30, 5)):
        starts = [model.computed[request] for request in requests]
        chunks = {
            request: tokens[start : start + count]
            for request, start, count in zip(requests, starts, counts, strict=True)
            if count
        }
        for request, got in model.hidden_step(chunks).items():
            assert_same_bits(got, expected[starts[request] :][: len(got)])


def gguf_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts stacked as in GGUF files, other tensors as they are, all under Qwen's names."""
    stacked: dict[str, list[torch.Tensor]] = {}
    plain = {}
    for number in sorted(range(len(tensors)), key=lambda i: _expert(list(tensors)[i])):
        name = list(tensors)[number]
        renamed = name.replace("block_sparse_moe", "mlp")
        for theirs, ours in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            renamed = renamed.replace(f".{theirs}.", f".{ours}.")
        if ".experts." in renamed:
            before, after = renamed.split(".experts.")
            key = f"{before}.experts.{after.split('.', 1)[1]}"
            stacked.setdefault(key, []).append(tensors[name])
        else:
            plain[renamed] = tensors[name]
    return plain | {name: torch.stack(parts) for name, parts in stacked.items()}


def _expert(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else -1


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("mixtral", "llama"), ("qwen3", "qwen3moe"), ("qwen2", "qwen2moe")],
)
def test_f32_gguf_equals_its_safetensors(name: str, architecture: str, tmp_path: Path) -> None:
    """Stacked experts in the file are the separate ones of the folder, and so are the logits."""
    make(tmp_path, name)
    content = json.loads((tmp_path / "config.json").read_text())
    content["rope_theta"] = content["rope_parameters"]["rope_theta"]
    tensors = load_file(tmp_path / "model.safetensors")
    path = tmp_path / "model.gguf"
    theirs = load_model_config(EngineArgs(str(tmp_path)))
    assert theirs.moe is not None
    counts = {
        "expert_count": theirs.moe.num_experts,
        "expert_used_count": theirs.moe.experts_per_token,
        "expert_feed_forward_length": theirs.moe.intermediate_size,
        "expert_shared_feed_forward_length": theirs.moe.shared_intermediate_size,
    }
    save_gguf(path, content, gguf_tensors(tensors), architecture=architecture, counts=counts)
    ours = load_model_config(EngineArgs(str(path)))
    assert (ours.architecture, ours.moe) == (theirs.architecture, theirs.moe)
    loaded = dict(iterate_tensors(GGUFFile(path), ours))
    assert len(loaded) == len(tensors)
    tokens = torch.randint(3, 131, (40,))
    logits = [PagedModel(config).step_from_empty(tokens) for config in (ours, theirs)]
    # rms_norm_eps passes through float32 in the file.
    assert_close(logits[0], logits[1], 1e-5)


EXPERT = "model.layers.1.block_sparse_moe.experts.4.w3.weight"


@pytest.mark.parametrize("damage", ["missing", "shape", "extra"])
def test_damaged_experts_are_named(damage: str, tmp_path: Path) -> None:
    make(tmp_path, "mixtral")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    named = EXPERT
    if damage == "missing":
        del tensors[EXPERT]
    elif damage == "shape":
        tensors[EXPERT] = tensors[EXPERT][:-1].clone()
    else:
        named = EXPERT.replace("experts.4", "experts.6")
        tensors[named] = tensors[EXPERT].clone()
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=named):
        load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts_per_tok", 13),
        ("num_experts_per_tok", 0),
        ("num_local_experts", "8"),
        ("num_local_experts", 2**20),
        ("moe_intermediate_size", None),
        ("norm_topk_prob", "yes"),
        ("mlp_only_layers", [0.5]),
        ("mlp_only_layers", "all"),
        ("decoder_sparse_step", 0),
    ],
)
def test_bad_configs_are_named(key: str, value: Any, tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=key):
        load(tmp_path)


def test_more_experts_than_memory_is_named() -> None:
    content = {**QWEN3_30B_A3B, "num_hidden_layers": 4096}
    with pytest.raises(ConfigError, match="num_experts: 128 is more than 16"):
        ModelConfig.from_hf(content, Path("x"), "dummy")


# Total, active: Mixtral-8x7B has 46.7 and 12.9 billion, Qwen3-30B-A3B 30.5 and 3.3.
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "total", "active"),
    [
        (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248),
        (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
    ],
    ids=["mixtral-8x7b", "qwen3-30b-a3b"],
)
def test_sizes_of_real_models(
    content: dict[str, Any], total: int, active: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = load_model_config(EngineArgs(str(tmp_path), load_format="dummy"))
    assert (config.num_parameters(), config.num_parameters(active=True)) == (total, active)
    shown = describe(config, DeviceFacts("cpu", "some machine", 2, 2**30))
    assert shown["parameters"] == f"{total:,}"
    assert shown["active_parameters"] == f"{active:,} for each token"
    norms = config.num_layer_parameters()[1] + config.hidden_size
    embedding = config.vocab_size * config.hidden_size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    assert config.flops_per_token(1) == 2 * (active - norms - embedding) + attention
