"""What a step costs, against numbers counted by hand and against ModelConfig's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.model import ModelConfig
from octavo.config.step_cost import (
    H200,
    Machine,
    Operation,
    causal_pairs,
    machine_for,
    step_operations,
)

# The shapes of the shared workloads.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = {
    **QWEN3_0_6B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "mlp_only_layers": [3],
}
QWEN2_MOE = {
    **QWEN3_MOE,
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 512,
    "mlp_only_layers": [],
}
MACHINE = Machine("round", bytes_per_s=4.3e12, flops_per_s=790e12, ramp_s=2e-6, source="a test")


def model(settings: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**settings, **changes}, Path("x"), "dummy")


def by_name(operations: list[Operation]) -> dict[str, Operation]:
    found = {operation.name: operation for operation in operations}
    assert len(found) == len(operations)
    return found


def test_llama3_8b_decode_by_hand() -> None:
    ops = by_name(step_operations(model(LLAMA3_8B), [(1, 100)], 1))
    assert list(ops) == [
        "embed", "input_norm", "qkv_proj", "rope_and_cache", "attention", "o_proj",
        "post_attention_norm", "gate_up_proj", "silu_and_mul", "down_proj",
        "final_norm", "gather_rows", "lm_head", "sample",
    ]  # fmt: skip
    once = {"embed", "final_norm", "gather_rows", "lm_head", "sample"}
    assert {name for name, op in ops.items() if op.count == 1} == once
    assert all(op.count == 32 for name, op in ops.items() if name not in once)
    # 32 x 6144 x 4096 weights of 2 bytes; one row of 4096 in, one of 6144 out.
    assert ops["qkv_proj"].weight_bytes == 1_610_612_736
    assert ops["qkv_proj"].other_bytes == 32 * 2 * (4096 + 6144)
    assert ops["qkv_proj"].flops == 1_610_612_736
    assert ops["gate_up_proj"].weight_bytes == 32 * 28672 * 4096 * 2 == 7_516_192_768
    # 100 keys of 131072 bytes over all layers; a row of 4096 in and out; 4 FLOPs a pair and column.
    assert ops["attention"].kv_bytes == 13_107_200
    assert ops["attention"].other_bytes == 32 * 2 * 4096 * 2
    assert ops["attention"].flops == 32 * 4 * 4096 * 100
    # 48 heads of 128 read and written, 2 x 64 fp32 of cos and sin, no weights.
    assert ops["rope_and_cache"].bytes == 32 * (2 * 48 * 128 * 2 + 512)
    # 31 norms of two vectors in and two out, one without a residual; each with its weight.
    assert ops["input_norm"].bytes == (4 * 32 - 2) * 8192 + 32 * 8192
    assert ops["final_norm"].bytes == 5 * 8192
    assert ops["silu_and_mul"].bytes == 32 * 3 * 14336 * 2
    assert ops["embed"].bytes == ops["gather_rows"].bytes == 2 * 8192
    assert ops["lm_head"].weight_bytes == 1_050_673_152
    assert ops["sample"].bytes == 128256 * 2


def test_llama3_8b_weights_are_15_gb_and_take_3_49_ms() -> None:
    weights = sum(op.weight_bytes for op in step_operations(model(LLAMA3_8B), [(1, 1)], 1))
    assert weights / 1e9 == pytest.approx(15.01, abs=0.005)
    assert weights / MACHINE.bytes_per_s * 1e3 == pytest.approx(3.49, abs=0.005)


def test_qwen3_0_6b_prefill_by_hand() -> None:
    """Two prompts of 1000 in one step, and one token a prompt sampled."""
    ops = by_name(step_operations(model(QWEN3_0_6B), [(1000, 1000)] * 2, 2))
    assert ops["attention"].flops == 28 * 4 * 2048 * (2 * 500_500)
    # 2 x 28 x 8 x 128 numbers of 2 bytes a key; query and result of 2048.
    assert ops["attention"].kv_bytes == 2000 * 114_688
    assert ops["attention"].other_bytes == 28 * 2 * 2000 * 2048 * 2
    assert ops["qkv_proj"].flops == 28 * 2 * 2000 * 4096 * 1024
    assert ops["o_proj"].weight_bytes == 28 * 2048 * 1024 * 2
    assert ops["rope_and_cache"].weight_bytes == 28 * 2 * 128 * 2
    assert ops["lm_head"].other_bytes == 2 * (1024 * 2 + 151936 * 2)
    assert ops["sample"].bytes == 2 * 151936 * 2
    # 2000 rows make the products compute-bound, and leave element-wise work memory-bound.
    assert ops["gate_up_proj"].ceiling_s(MACHINE) == ops["gate_up_proj"].flops / 790e12
    assert ops["silu_and_mul"].ceiling_s(MACHINE) == ops["silu_and_mul"].bytes / 4.3e12


@pytest.mark.parametrize("settings", [LLAMA3_8B, QWEN3_0_6B], ids=["llama3-8b", "qwen3-0.6b"])
@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": False}], ids=str
)
@pytest.mark.parametrize("context", [1, 777])
def test_totals_are_those_of_the_model(
    settings: dict[str, Any], changes: dict[str, Any], context: int
) -> None:
    config = model(settings, **changes)
    operations = step_operations(config, [(1, context)], 1)
    # An untied embedding is not read as a whole; and the model counts a bias as a product.
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * 2
    assert sum(op.weight_bytes for op in operations) == config.weight_bytes() - table
    biases = 0
    if config.attention_bias:
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        biases = config.num_layers * (qkv + config.hidden_size)
    assert sum(op.flops for op in operations) == config.flops_per_token(context) - 2 * biases
    assert sum(op.kv_bytes for op in operations) == context * config.kv_bytes_per_token()


@pytest.mark.parametrize("settings", [QWEN3_MOE, QWEN2_MOE], ids=["qwen3-moe", "qwen2-moe"])
def test_one_token_costs_its_own_experts(settings: dict[str, Any]) -> None:
    config = model(settings, qkv_bias=False)
    operations = step_operations(config, [(1, 50)], 1)
    weights = sum(op.weight_bytes for op in operations)
    assert weights == config.num_parameters(active=True) * 2 < config.weight_bytes()
    assert sum(op.flops for op in operations) == config.flops_per_token(50)


def test_many_tokens_meet_all_experts() -> None:
    """Each at most once, and at two tokens 4 + 4 x 12 / 16 of them on the average."""
    ops = [by_name(step_operations(model(QWEN3_MOE), [(1, 9)] * n, 0)) for n in (1, 2, 500)]
    read = [each["experts_gate_up_proj"].weight_bytes for each in ops]
    expert = 27 * 2 * 768 * 1024 * 2
    assert read == [4 * expert, 7 * expert, 16 * expert]
    assert ops[0]["gate_up_proj"].count == 1
    assert ops[0]["router"].count == ops[0]["combine"].count == 27


def test_mlp_biases_are_weights() -> None:
    config = model(LLAMA3_8B, mlp_bias=True)
    plain = by_name(step_operations(model(LLAMA3_8B), [(1, 1)], 1))
    biased = by_name(step_operations(config, [(1, 1)], 1))
    for name, outputs in (("gate_up_proj", 2 * 14336), ("down_proj", 4096)):
        assert biased[name].weight_bytes - plain[name].weight_bytes == 32 * outputs * 2


@given(st.integers(1, 300), st.integers(0, 300))
def test_causal_pairs_are_counted_one_by_one(query_len: int, computed: int) -> None:
    seen = sum(position + 1 for position in range(computed, computed + query_len))
    assert causal_pairs(query_len, computed + query_len) == seen


@given(st.lists(st.integers(1, 40), min_size=2, max_size=5))
def test_chunks_do_the_arithmetic_of_the_whole(chunks: list[int]) -> None:
    """Prefill in chunks has the FLOPs of prefill at once, and reads more K/V."""
    config = model(QWEN3_0_6B)
    total = sum(chunks)
    whole = by_name(step_operations(config, [(total, total)], 0))["attention"]
    done, flops, kv_bytes = 0, 0, 0
    for chunk in chunks:
        done += chunk
        part = by_name(step_operations(config, [(chunk, done)], 0))["attention"]
        flops, kv_bytes = flops + part.flops, kv_bytes + part.kv_bytes
    assert flops == whole.flops
    assert kv_bytes > whole.kv_bytes


def test_a_step_without_samples_ends_at_the_norm() -> None:
    names = [op.name for op in step_operations(model(QWEN3_0_6B), [(5, 9)], 0)]
    assert names[-1] == "final_norm"


@pytest.mark.parametrize("request_", [(0, 5), (6, 5), (-1, 3)])
def test_impossible_lengths_are_refused(request_: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        step_operations(model(QWEN3_0_6B), [(1, 1), request_], 1)


def test_ceiling_and_expectation() -> None:
    memory = Operation("m", 3, other_bytes=43, flops=790)
    assert memory.ceiling_s(MACHINE) == pytest.approx(10e-12)
    assert memory.expected_s(MACHINE) == pytest.approx(10e-12 + 6e-6)
    assert Operation("c", 1, other_bytes=43, flops=79000).ceiling_s(MACHINE) == pytest.approx(1e-10)


def test_figures_of_another_device_are_called_assumed() -> None:
    assert machine_for("NVIDIA H200") is H200
    for name in ("NVIDIA GH200 480GB", "AMD EPYC 9654"):
        other = machine_for(name)
        assert other.source.startswith(f"assumed, not those of {name!r}: ")
        assert (other.bytes_per_s, other.flops_per_s) == (H200.bytes_per_s, H200.flops_per_s)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(1, 220))
def test_pairs_in_a_window_are_counted_one_by_one(query: int, computed: int, window: int) -> None:
    seen = sum(min(position + 1, window) for position in range(computed, computed + query))
    assert causal_pairs(query, computed + query, window) == seen


def test_a_window_bounds_the_keys_that_are_read() -> None:
    config = model(LLAMA3_8B)
    windowed = dataclasses.replace(config, sliding_window=100)
    [short], [long] = (
        [op for op in step_operations(windowed, [(1, keys)], 1) if op.name == "attention"]
        for keys in (100, 5000)
    )
    assert short == long
    assert long.kv_bytes == 100 * config.kv_bytes_per_token()
    [chunk] = [op for op in step_operations(windowed, [(7, 5000)], 1) if op.name == "attention"]
    assert chunk.kv_bytes == 106 * config.kv_bytes_per_token()
    assert windowed.flops_per_token(5000) == config.flops_per_token(100)
    assert windowed.flops_per_token(0) == config.flops_per_token(0)


def test_layers_of_two_kinds_read_each_what_it_sees() -> None:
    """Gemma 3: of 6 layers one sees all 5,000 keys and five see 512; four norms a layer."""
    content = {
        **LLAMA3_8B,
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6,
        "sliding_window": 512,
    }
    config = ModelConfig.from_hf(content, Path("folder"), "dummy")
    operations = {op.name: op for op in step_operations(config, [(1, 5000)], 1)}
    keys = 5000 + 5 * 512
    assert operations["attention"].flops == 4 * config.num_heads * config.head_dim * keys
    assert operations["attention"].kv_bytes == keys * config.kv_bytes_per_token() // 6
    assert sum(op.flops for op in operations.values()) == config.flops_per_token(5000)
    weights = sum(op.weight_bytes for op in operations.values())
    assert weights == config.weight_bytes() - config.vocab_size * config.hidden_size * 2
