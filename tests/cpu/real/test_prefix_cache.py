"""What the prefix cache saves on the real model, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import SamplingParams
from tests.cpu.real.helpers import LONG, engine, fingerprint

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)


def test_second_request_computes_only_what_is_not_shared(smollm2_path: Path) -> None:
    """A shared prefix of 1,000 tokens: the second request runs its own tail only."""
    with engine(smollm2_path, dtype="float32", max_model_len=2048) as llm:
        shared = (llm.get_tokenizer().encode(LONG) * 8)[:1000]
        tails = [llm.get_tokenizer().encode(text) for text in ("The first tail.", "Another end:")]
        [first] = llm.generate([shared + tails[0]], PARAMS, use_tqdm=False)
        before = len(llm.engine.core.step_log)
        [second] = llm.generate([shared + tails[1]], PARAMS, use_tqdm=False)
        steps = list(llm.engine.core.step_log)[before:]
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == 1000 // 16 * 16
        prefill = sum(step.num_prefill_tokens for step in steps)
        assert prefill == 1000 + len(tails[1]) - second.num_cached_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_equals_cold_around_borders(dtype: str, smollm2_path: Path) -> None:
    """Same prompt twice at block and split borders: a hit happened and no bit changed
    (cases S14, S22, S23)."""
    with engine(smollm2_path, dtype=dtype) as llm:
        ids = llm.get_tokenizer().encode(LONG) * 2
        for length in (15, 16, 17, 33, 64, 65, 255, 256, 257):
            assert llm.reset_prefix_cache()
            [cold] = llm.generate([ids[:length]], PARAMS, use_tqdm=False)
            [warm] = llm.generate([ids[:length]], PARAMS, use_tqdm=False)
            assert fingerprint(warm) == fingerprint(cold), length
            assert cold.num_cached_tokens == 0
            assert warm.num_cached_tokens == (length - 1) // 16 * 16


def test_divergence_inside_a_block(smollm2_path: Path) -> None:
    """P, then P + 7 tokens, then a prompt that leaves P in the middle of a block (case S22)."""
    with engine(smollm2_path, dtype="float32") as llm:
        base = (llm.get_tokenizer().encode(LONG) * 2)[:100]
        other = base[:55] + base[:45]
        family = [base, base + base[3:10], other]
        warm = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for prompt in family]
        cold = []
        for prompt in family:
            assert llm.reset_prefix_cache()
            cold += llm.generate([prompt], PARAMS, use_tqdm=False)
    assert [fingerprint(output) for output in warm] == [fingerprint(output) for output in cold]
    assert [output.num_cached_tokens for output in warm] == [0, 96, 48]
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0]


def test_salt_separates_prefixes(smollm2_path: Path) -> None:
    with engine(smollm2_path, dtype="float32") as llm:
        ids = llm.get_tokenizer().encode(LONG)

        def cached(salt: str | None) -> int:
            prompt = {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
            return llm.generate(prompt, PARAMS, use_tqdm=False)[0].num_cached_tokens

        assert cached(None) == 0
        assert cached("tenant-a") == 0
        assert cached("tenant-b") == 0
        assert cached("tenant-a") == cached(None) == (len(ids) - 1) // 16 * 16
