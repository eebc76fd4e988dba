"""The engine against transformers on the real model, fp32: the same greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import SamplingParams
from tests.cpu.real.helpers import TEXTS, engine


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_greedy_tokens_equal_transformers(
    whole: bool, smollm2_path: Path, smollm2_reference: Any
) -> None:
    """8 prompts x 48 tokens, batched here, one by one there.

    `whole`: one forward pass over prompt and output must have each output token as its arg-max, which
    is greedy decoding, by induction. Else by its `generate`, which takes six times as long.
    """
    params = SamplingParams(temperature=0.0, max_tokens=48, min_tokens=48)
    with engine(smollm2_path, dtype="float32") as llm:
        outputs = llm.generate(list(TEXTS), params, use_tqdm=False)
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(tokens) == 48
        with torch.inference_mode():
            if whole:
                logits = smollm2_reference(torch.tensor([prompt + tokens])).logits[0]
                logits[
                    :, smollm2_reference.generation_config.eos_token_id
                ] = -torch.inf  # min_tokens
                expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            else:
                expected = smollm2_reference.generate(
                    torch.tensor([prompt]), max_new_tokens=48, min_new_tokens=48, do_sample=False
                )[0, len(prompt) :].tolist()
        assert tokens == expected
