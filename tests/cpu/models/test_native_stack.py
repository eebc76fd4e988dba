"""All layers in one call into the CPU's kernels: the bits of the layers called one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.kernels.cpu.native import cpu_kernels
from tests.cpu.models.helpers import load, reference
from tests.cpu.paged import assert_same_bits

GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("Llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "head_norms": ("Qwen3", {"head_dim": 32}),
    "groups_and_post_norms": ("Gemma3Text:Gemma3", {**GEMMA, "sliding_window_pattern": 3}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_one_call_has_the_bits_of_many(name: str, tmp_path: Path) -> None:
    """Prefill, a chunk beside a new request, and decodes."""
    family, changes = VARIANTS[name]
    reference(tmp_path, family, **changes)
    paged = load(tmp_path, "bfloat16")
    kernels = cpu_kernels(torch.bfloat16)
    if kernels is None or not kernels.has_amx:
        assert paged.model._stack is None
        pytest.skip("this processor has no AMX")
    assert paged.model._stack is not None
    first, second = torch.randint(3, 131, (2, 150))

    def run() -> torch.Tensor:
        paged.reset()
        a, b = paged.add(150), paged.add(150)
        plan = [
            {a: first[:90]},
            {a: first[90:91], b: second[:149]},
            {b: second[149:], a: first[91:]},
        ]
        return torch.cat([part for step in plan for part in paged.hidden_step(step).values()])

    together = run()
    paged.model._stack = None
    assert_same_bits(run(), together)


def test_layers_that_it_does_not_cover_run_one_by_one(tmp_path: Path) -> None:
    """fp32, whose products are torch's; head_dim 16, whose attention is."""
    reference(tmp_path, "Llama", head_dim=32)
    assert load(tmp_path, "float32").model._stack is None
    reference(tmp_path, "Llama", head_dim=16)
    assert load(tmp_path, "bfloat16").model._stack is None
