"""Models that run by the CPU's own kernels, through the whole engine: windows, groups, experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.models.native_stack import NativeStack
from tests.cpu.models.helpers import reference
from tests.cpu.models.test_native_stack import VARIANTS
from tests.cpu.native_ops import needs_kernels

pytestmark = needs_kernels

PROMPTS = [[3 + (7 * i + j) % 120 for j in range(5 + 37 * i)] for i in range(5)]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("window", 25), ("groups_and_post_norms", 50), ("experts_and_dense_layers", 25)],
)
def test_batch_chunks_and_cache_change_nothing(
    name: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and logprob bits of requests in chunks, beside each other, in a pool that is too small
    for all and so preempts, with prefix hits; against each alone at once."""
    family, changes = VARIANTS[name]
    reference(tmp_path, family, **changes)
    steps = []
    run = NativeStack.run
    monkeypatch.setattr(NativeStack, "run", lambda *args: steps.append(1) or run(*args))
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=60, logprobs=1, ignore_eos=True)

    def answers(together: bool, **settings: int | bool) -> list[object]:
        with LLM(
            str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=256, **settings
        ) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
            for _ in range(2):
                if together:
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                else:
                    outputs = [llm.generate([one], params, use_tqdm=False)[0] for one in prompts]
            return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]

    alone = answers(False, enable_prefix_caching=False)
    assert len(steps) >= 2 * 60 * len(PROMPTS)
    settings = {"max_num_batched_tokens": 37, "max_num_seqs": 8, "num_gpu_blocks_override": blocks}
    assert answers(True, **settings) == alone
