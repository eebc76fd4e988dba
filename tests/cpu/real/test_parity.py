"""The engine against transformers on the real model, fp32: the same greedy tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from octavo import SamplingParams
from tests.cpu.real.helpers import TEXTS, engine


def test_greedy_tokens_equal_transformers(smollm2_path: Path, smollm2_reference: object) -> None:
    """8 prompts x 48 tokens, batched here, one by one there."""
    params = SamplingParams(temperature=0.0, max_tokens=48, min_tokens=48)
    with engine(smollm2_path, dtype="float32") as llm:
        outputs = llm.generate(list(TEXTS), params, use_tqdm=False)
    for output in outputs:
        with torch.inference_mode():
            expected = smollm2_reference.generate(  # type: ignore[attr-defined]
                torch.tensor([output.prompt_token_ids]),
                max_new_tokens=48,
                min_new_tokens=48,
                do_sample=False,
            )[0, len(output.prompt_token_ids) :].tolist()
        assert output.outputs[0].token_ids == expected
