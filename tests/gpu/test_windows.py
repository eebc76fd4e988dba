"""Windows on the GPU: blocks that were passed are reused, and still nothing depends on the batch.

Mistral has one KV group, Gemma 3 three, and so a graph whose inputs are three block tables.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.engines import engine, fingerprint, model_folder
from tests.gpu.test_engine import LENGTHS, PARAMS, PROMPTS, one_by_one, together

from octavo import LLM


@pytest.fixture(scope="module", params=["mistral", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("windows"), request.param)


@pytest.fixture(scope="module")
def solo(model: Path) -> list[Any]:
    return one_by_one(model)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_batched_cold_and_warm_equal_solo(eager: bool, model: Path, solo: list[Any]) -> None:
    assert len({bits for _, bits in solo}) == len(LENGTHS)
    with engine(model, enforce_eager=eager) as llm:
        assert together(llm) == solo
        cold = llm.engine.core.stats()
        assert together(llm, list(reversed(range(len(PROMPTS))))) == solo
        warm = llm.engine.core.stats()
        hits = warm.prefix_cache_hits - cold.prefix_cache_hits
        assert hits > 0.8 * (warm.prefix_cache_queries - cold.prefix_cache_queries)


@pytest.mark.parametrize("chunk", [37, 501])
def test_chunked_in_a_scarce_pool_equals_solo(chunk: int, model: Path, solo: list[Any]) -> None:
    """Blocks that a window has passed are at once somebody else's."""
    scarce = 260 if model.name == "mistral" else 720
    with engine(
        model,
        long_prefill_token_threshold=chunk,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        num_gpu_blocks_override=scarce,
        max_model_len=2400,
    ) as llm:
        assert together(llm) == solo


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_preempted_equals_solo(overlap: bool, model: Path, solo: list[Any]) -> None:
    with engine(model, async_scheduling=overlap, max_num_batched_tokens=512) as llm:
        assert preempted(llm) == solo


def preempted(llm: LLM) -> list[Any]:
    """All prompts together, where every fifth step one of them gives up its blocks."""
    engine_, state, done = llm.engine, llm.engine.core.scheduler.state, {}
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine_.add_request(str(number), prompt, params)
    for step in itertools.count(1):
        if not engine_.has_work():
            break
        done |= {int(one.request_id): fingerprint(one) for one in engine_.step() if one.finished}
        if step % 5 == 0 and len(state.running):
            state.preempt(list(state.running)[step % len(state.running)])
    assert state.totals.preemptions > 3
    return [done[number] for number in range(len(PROMPTS))]
