"""A request's tokens and logprob bits depend on nothing but the request: real model, CPU.

Every variant is compared with each request run alone on a cold engine without overlap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.engine.tokenizer import load_tokenizer
from tests.cpu.real.helpers import engine, fingerprint, params, prompts, run

DTYPES = ["float32", "bfloat16"]
CHUNKS = [7, 37, 64, 501]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def solo(dtype: str, smollm2_path: Path) -> list[Any]:
    """Each request alone, cold, whole prompt in one step, no overlap."""
    settings = {"async_scheduling": False, "enable_prefix_caching": False}
    with engine(smollm2_path, dtype=dtype, max_num_batched_tokens=1024, **settings) as llm:
        return [
            fingerprint(llm.generate(prompt, param, use_tqdm=False)[0])
            for prompt, param in zip(prompts(), params(), strict=True)
        ]


def test_the_comparison_can_fail(solo: list[Any], dtype: str, smollm2_path: Path) -> None:
    """Eight requests, eight different outputs; and a prompt that the largest chunk cuts."""
    assert len({tokens for prints in solo for tokens, _ in prints}) == 8
    lengths = [len(load_tokenizer(smollm2_path).encode(text)) for text in prompts()]
    assert min(lengths) < 2
    assert max(lengths) > max(CHUNKS)


@pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
def test_batched_cold_and_warm_equals_solo(
    overlap: bool, dtype: str, solo: list[Any], smollm2_path: Path
) -> None:
    with engine(smollm2_path, dtype=dtype, async_scheduling=overlap) as llm:
        assert run(llm) == solo
        cold = llm.engine.core.stats()
        assert run(llm) == solo
        warm = llm.engine.core.stats()
        hits = warm.prefix_cache_hits - cold.prefix_cache_hits
        assert hits > 0.9 * (warm.prefix_cache_queries - cold.prefix_cache_queries)


def test_reordered_equals_solo(dtype: str, solo: list[Any], smollm2_path: Path) -> None:
    """Overlap with one dtype, none with the other."""
    settings = {"async_scheduling": dtype == "float32", "enable_prefix_caching": False}
    with engine(smollm2_path, dtype=dtype, **settings) as llm:
        assert run(llm, (5, 3, 7, 0, 6, 2, 4, 1)) == solo


@pytest.mark.parametrize(
    ("chunk", "overlap"), [(chunk, index % 2 == 1) for index, chunk in enumerate(CHUNKS)]
)
def test_chunked_equals_solo(
    chunk: int, overlap: bool, dtype: str, solo: list[Any], smollm2_path: Path
) -> None:
    """Overlap with every other chunk size."""
    with engine(
        smollm2_path,
        dtype=dtype,
        async_scheduling=overlap,
        long_prefill_token_threshold=chunk,
        max_num_batched_tokens=max(chunk, 16),
        enable_prefix_caching=False,
    ) as llm:
        # Small chunks of long prompts are many steps: those prompts are left to larger chunks.
        order = {7: (0, 1, 2, 4, 5, 7), 37: (0, 1, 2, 4, 5, 6, 7)}.get(chunk, tuple(range(8)))
        assert run(llm, order) == [solo[index] for index in order]


@pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
def test_preempted_equals_solo(
    overlap: bool, dtype: str, solo: list[Any], smollm2_path: Path
) -> None:
    """All prompts fit the pool, all prompts with their outputs do not: some must give way."""
    lengths = [len(load_tokenizer(smollm2_path).encode(text)) for text in prompts()]
    prompt_blocks = sum(-(-length // 16) for length in lengths)
    with engine(
        smollm2_path,
        dtype=dtype,
        num_gpu_blocks_override=prompt_blocks + 3,
        max_model_len=None,
        enable_prefix_caching=False,
        async_scheduling=overlap,
    ) as llm:
        assert run(llm) == solo
        assert llm.engine.core.stats().num_preemptions > 0


@pytest.fixture(scope="module")
def alone(dtype: str, smollm2_path: Path) -> list[Any]:
    """As `solo`, with 16 tokens each."""
    settings = {"async_scheduling": False, "enable_prefix_caching": False}
    with engine(smollm2_path, dtype=dtype, max_num_batched_tokens=1024, **settings) as llm:
        return [
            fingerprint(llm.generate(prompt, param, use_tqdm=False)[0])
            for prompt, param in zip(prompts(), params(max_tokens=16), strict=True)
        ]


@pytest.mark.soak
@pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_prompt_in_every_chunk_size(
    chunk: int, overlap: bool, dtype: str, alone: list[Any], smollm2_path: Path
) -> None:
    """What the tests above leave out for time: all prompts in small chunks, and longer outputs."""
    with engine(
        smollm2_path,
        dtype=dtype,
        async_scheduling=overlap,
        long_prefill_token_threshold=chunk,
        max_num_batched_tokens=max(chunk, 16),
        enable_prefix_caching=False,
    ) as llm:
        assert run(llm, max_tokens=16) == alone
