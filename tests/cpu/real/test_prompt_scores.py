"""prompt_logprobs on the real model: right, independent of order and chunks, and cache-friendly."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from tests.cpu.real.helpers import LONG, TEXTS, engine

SCORES = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)


def values(output: RequestOutput) -> list[dict[int, float]]:
    """Scores of every position but the first."""
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    return [
        {token: score.logprob for token, score in entry.items()}
        for entry in output.prompt_logprobs[1:]
        if entry is not None
    ]


def score(
    llm: LLM, texts: list[str], params: SamplingParams = SCORES
) -> list[list[dict[int, float]]]:
    return [values(output) for output in llm.generate(texts, params, use_tqdm=False)]


def test_scores_equal_transformers(smollm2_path: Path, smollm2_reference: object) -> None:
    """Token i is scored from position i-1 (case L04)."""
    with engine(smollm2_path, dtype="float32") as llm:
        [output] = llm.generate(LONG, SCORES, use_tqdm=False)
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason == "length"
    ids = output.prompt_token_ids
    with torch.inference_mode():
        logits = smollm2_reference(torch.tensor([ids])).logits[0].float()  # type: ignore[operator]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    got = torch.tensor([entry[token] for entry, token in zip(values(output), ids[1:], strict=True)])
    assert (got - expected).abs().max() <= 2e-4
    assert torch.isfinite(got).all()


@pytest.mark.parametrize(("dtype", "overlap"), [("float32", True), ("bfloat16", False)])
def test_scores_do_not_depend_on_order_or_chunks(
    dtype: str, overlap: bool, smollm2_path: Path
) -> None:
    """Three prompts sharing a prefix in all six orders, chunked, cached or not (case L03)."""
    shared = " ".join(TEXTS[:3])
    texts = [shared + tail for tail in (TEXTS[0], TEXTS[5], " The end.")]
    with engine(smollm2_path, dtype=dtype, enable_prefix_caching=False) as llm:
        expected = [score(llm, [text])[0] for text in texts]
    with engine(
        smollm2_path,
        dtype=dtype,
        async_scheduling=overlap,
        long_prefill_token_threshold=37,
        max_num_batched_tokens=64,
    ) as llm:
        for order in itertools.permutations(range(3)):
            llm.reset_prefix_cache()
            for index in order:
                assert score(llm, [texts[index]])[0] == expected[index]
        assert score(llm, texts) == expected


@pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
def test_prefix_cache_serves_scored_requests(overlap: bool, smollm2_path: Path) -> None:
    """A second scored request takes the shared prefix from the cache; a plain one too; with output."""
    with engine(smollm2_path, dtype="float32", async_scheduling=overlap) as llm:
        plain = SamplingParams(temperature=0.0, max_tokens=1)
        llm.generate(LONG, plain, use_tqdm=False)
        [first] = llm.generate(LONG, SCORES, use_tqdm=False)
        assert first.num_cached_tokens == 0, "the plain request kept no hidden states"
        [second] = llm.generate(LONG, SCORES, use_tqdm=False)
        assert second.num_cached_tokens == (len(second.prompt_token_ids) - 1) // 16 * 16
        assert values(second) == values(first)
        [third] = llm.generate(LONG, plain, use_tqdm=False)
        assert third.num_cached_tokens == second.num_cached_tokens
        # max_tokens 1 gives the same prompt scores and one token more (case L04).
        [alone] = score(llm, [TEXTS[0]])
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, logprobs=2)
        [output] = llm.generate(TEXTS[0], params, use_tqdm=False)
        assert values(output) == alone
        assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs or []) == 1


def test_scores_survive_preemption(smollm2_path: Path) -> None:
    texts = [TEXTS[index] + TEXTS[index + 4] for index in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=0, ignore_eos=True)
    with engine(smollm2_path, dtype="float32", enable_prefix_caching=False) as llm:
        expected = [score(llm, [text], params)[0] for text in texts]
        blocks = sum(-(-len(llm.get_tokenizer().encode(text)) // 16) for text in texts)
    with engine(
        smollm2_path, dtype="float32", num_gpu_blocks_override=blocks + 2, max_model_len=None
    ) as llm:
        assert score(llm, texts, params) == expected
        assert llm.engine.core.stats().num_preemptions > 0
