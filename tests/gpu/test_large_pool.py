"""The engine in KV blocks whose offsets in a layer fit 32 bits neither as bytes nor as elements.

Cache writes, attention and the store of hidden states are those of serving; only the free list is
narrowed to the end of the pool. Needs about 16 GB of GPU memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.engines import engine, fingerprint, model_folder, sampling, token_prompts

from octavo import LLM, SamplingParams
from octavo.core.block_pool import BlockPool

BLOCKS, FIRST_FAR = 266_000, 264_000
"""Of 16 KiB a layer; the far ones suffice for all requests at once."""
PROMPTS = token_prompts([1, 17, 257, 700, 2300], seed=5)
PARAMS = [sampling(index) for index in range(len(PROMPTS))]
SCORED = SamplingParams(
    temperature=0.0, max_tokens=2, prompt_logprobs=1, detokenize=False, ignore_eos=True
)


def answers(llm: LLM) -> list[Any]:
    """Tokens and score bits of all requests in one batch, and the scores of a prompt."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    [scored] = llm.generate(PROMPTS[2], SCORED, use_tqdm=False)
    assert scored.prompt_logprobs is not None
    return [*map(fingerprint, outputs), scored.prompt_logprobs]


@contextmanager
def only_far_blocks(pool: BlockPool) -> Iterator[None]:
    """Nothing but the end of an idle pool can be allocated."""
    held = pool.allocate(pool.num_free_blocks)
    near = [block for block in held if block.block_id < FIRST_FAR]
    pool.free(block for block in held if block.block_id >= FIRST_FAR)
    try:
        yield
    finally:
        pool.free(near)


def is_untouched(blocks: torch.Tensor) -> bool:
    """All NaN. A part at a time: the masks would take gigabytes."""
    return all(bool(part.isnan().all()) for part in torch.split(blocks, 1 << 15))


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_far_blocks_give_the_results_of_near_ones(
    eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The check would miss a request behind the blocks that this test holds.
    monkeypatch.setenv("OCTAVO_CHECK_INTEGRITY", "0")
    gc.collect()
    torch.cuda.empty_cache()  # what earlier engines left in torch's cache does not count as free
    model = model_folder(tmp_path, "qwen")
    with engine(model, num_gpu_blocks_override=BLOCKS, enforce_eager=eager) as llm:
        core = llm.engine.core
        runner = core._executor._worker._runner
        assert runner is not None
        caches = runner._kv_caches
        assert caches[0][:FIRST_FAR].numel() > 2**31
        expected = answers(llm)
        assert llm.reset_prefix_cache()
        torch.cuda.synchronize()
        for cache in caches:
            cache[1:].fill_(float("nan"))
        torch.cuda.synchronize()  # the engine works on a stream of its own
        with only_far_blocks(core.scheduler.state.kv.pool):
            assert answers(llm) == expected
            hits = core.stats().prefix_cache_hits
            assert answers(llm) == expected  # from the cache
            assert core.stats().prefix_cache_hits > hits
            llm.engine.drain()
        torch.cuda.synchronize()
        for cache in caches:
            # A write and a read that both wrap would agree with each other, but not with this.
            assert is_untouched(cache[1:FIRST_FAR])
            assert not is_untouched(cache[FIRST_FAR:])
            assert not bool(cache[0].any())
