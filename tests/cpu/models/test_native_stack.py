"""All layers in one call into the CPU's kernels, against the same model by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.attention.native import NativeAttention
from octavo.kernels.cpu.native import cpu_kernels
from tests.cpu.models.helpers import check_chunks, check_logits, load, reference
from tests.cpu.native_ops import needs_kernels
from tests.cpu.paged import assert_close, assert_same_bits

pytestmark = needs_kernels

# head_dim 32 and widths that are multiples of 32: what our kernels take.
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 48, "sliding_window": 40}
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1}  # head_dim is 64 / 2
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
EXPERTS = {"head_dim": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {"head_dim": 32}),
    "biases": ("Llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "head_norms": ("Qwen3", {"head_dim": 32}),
    "window": ("Mistral", {"head_dim": 32, "sliding_window": 70}),
    "part_of_a_head_turns": ("Phi3", {**WIDE, "pad_token_id": 0, "rope_parameters": HALF}),
    "groups_and_post_norms": ("Gemma3Text:Gemma3", {**GEMMA, "sliding_window_pattern": 3}),
    "experts": ("Qwen3Moe", {**EXPERTS, "num_experts": 4}),
    "experts_and_dense_layers": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 4, "mlp_only_layers": [1]},
    ),
    "shared_expert": (
        "Qwen2Moe",
        {
            **EXPERTS,
            **WIDE,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [2],
        },
    ),
}


def run(folder: Path, dtype: str) -> tuple[torch.Tensor, bool]:
    """Hidden states of a prefill, a chunk beside a new request, decodes; and if they are native."""
    paged = load(folder, dtype)
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randint(3, 131, (2, 150), generator=generator)
    a, b = paged.add(150), paged.add(150)
    plan = [{a: first[:90]}, {a: first[90:91], b: second[:149]}, {b: second[149:], a: first[91:]}]
    hidden = torch.cat([part for step in plan for part in paged.hidden_step(step).values()])
    return hidden.float(), paged.model._stack is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_torch(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = VARIANTS[name]
    reference(tmp_path, family, **changes)
    got, is_native = run(tmp_path, dtype)
    assert is_native
    cpu_kernels.cache_clear()
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")
    expected, is_native = run(tmp_path, dtype)
    cpu_kernels.cache_clear()
    assert not is_native
    if dtype == "float32":
        assert_close(got, expected, 2e-4)
    else:  # experts are chosen by scores that may be almost equal: most rows, not each
        far = ((got - expected).abs().amax(1) > 0.25).float().mean()
        assert far < (0.05 if "expert" in name else 1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    check_logits(tmp_path, reference(tmp_path, family, **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_change_no_bit(name: str, dtype: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    reference(tmp_path, family, **changes)
    check_chunks(tmp_path, dtype)


@pytest.mark.parametrize("name", ["plain", "groups_and_post_norms", "experts"])
def test_threads_change_no_bit(name: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[name]
    reference(tmp_path, family, **changes)
    expected, _ = run(tmp_path, "bfloat16")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same_bits(run(tmp_path, "bfloat16")[0], expected)
    finally:
        torch.set_num_threads(before)


def test_weights_are_held_once(tmp_path: Path) -> None:
    """After loading, a linear has its packed weight and nothing else."""
    reference(tmp_path, "Llama", head_dim=32)
    paged = load(tmp_path, "bfloat16")
    assert isinstance(paged.backend, NativeAttention)
    layers = [name for name, _ in paged.model.named_parameters() if name.startswith("layers")]
    assert layers
    assert all("norm" in name for name in layers)
