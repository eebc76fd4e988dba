"""The engine on a tiny model: leaks, limits, order. Every test ends with nothing held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.errors import InvalidRequestError
from tests.cpu.tiny.helpers import PARAMS, PROMPTS, params, run, tiny, tokens


def test_requests_that_end_in_their_first_step_leave_no_slot_behind(
    overlap: bool, tiny_model: Path
) -> None:
    """max_tokens 1 with chunked prefill beside a running decode, 1,000 times (case S07)."""
    with tiny(
        tiny_model, async_scheduling=overlap, long_prefill_token_threshold=16, max_model_len=256
    ) as llm:
        engine, ended = llm.engine, 0
        engine.add_request("stream-0", [5, 6, 7], params(max_tokens=200))
        for number in range(1000):
            prompt = [3 + number % 500] * (1 + number % 20)
            engine.add_request(f"one-{number}", prompt, params(max_tokens=1))
            for output in engine.step():
                ended += output.finished and output.request_id.startswith("one")
                if output.finished and output.request_id.startswith("stream"):
                    engine.add_request(f"stream-{number}", [5, 6, 7], params(max_tokens=200))
        while engine.has_work():
            ended += sum(o.finished and o.request_id.startswith("one") for o in engine.step())
    assert ended == 1000


def test_prompt_as_long_as_the_context(overlap: bool, tiny_model: Path) -> None:
    """Exactly the limit: scores only; one more or an output token: refused (case P02)."""
    with tiny(tiny_model, async_scheduling=overlap, max_model_len=64) as llm:
        [output] = run(llm, [[9] * 64], params(max_tokens=0, prompt_logprobs=0))
        assert len(output.prompt_logprobs or []) == 64
        [output] = run(llm, [[9] * 63], params(max_tokens=5))
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="prompt"):
            run(llm, [[9] * 64], params(max_tokens=1))
        with pytest.raises(InvalidRequestError, match="prompt"):
            run(llm, [[9] * 65], params(max_tokens=0))


def test_pool_smaller_than_the_context_is_one_limit(overlap: bool, tiny_model: Path) -> None:
    """Context 512, pool of 8 blocks: admission, and max_tokens, use what fits (case P03)."""
    with tiny(tiny_model, async_scheduling=overlap, num_gpu_blocks_override=9) as llm:
        assert llm.engine.config.scheduler.max_model_len == 128
        with pytest.raises(InvalidRequestError, match="128"):
            run(llm, [[9] * 200], PARAMS)
        [output] = run(llm, [[9] * 100], params(max_tokens=None))
        assert len(output.outputs[0].token_ids) == 28


def test_aborts_in_every_state(overlap: bool, tiny_model: Path) -> None:
    """Before it was scheduled, in prefill, in decode, when finished, twice, unknown (S08 to S10)."""
    with tiny(
        tiny_model, async_scheduling=overlap, long_prefill_token_threshold=16, max_num_seqs=2
    ) as llm:
        engine = llm.engine
        engine.add_request("fresh", PROMPTS[1], PARAMS)
        [output] = engine.abort(["fresh", "fresh", "unknown"])
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        for steps in range(12):
            engine.add_request("a", PROMPTS[3], PARAMS)
            engine.add_request("b", PROMPTS[0], PARAMS)
            engine.add_request("c", PROMPTS[2], PARAMS)
            for _ in range(steps):
                engine.step()
            engine.abort(["a", "c", "a"])
            engine.abort(["a"])
            last = [output for _ in range(40) if engine.has_work() for output in engine.step()]
            assert all(output.request_id == "b" for output in last)
            assert not engine.has_work()


def test_random_arrivals_and_aborts_equal_solo(overlap: bool, tiny_model: Path) -> None:
    """Requests come and go at random under memory pressure; survivors equal their solo runs."""
    generator = torch.Generator().manual_seed(5)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    prompts = [[3 + draw(500) for _ in range(1 + draw(90))] for _ in range(40)]
    settings = [params(temperature=0.9, seed=index, max_tokens=1 + draw(24)) for index in range(40)]
    with tiny(tiny_model, enable_prefix_caching=False, async_scheduling=False) as llm:
        solo = [tokens(run(llm, [p], s))[0] for p, s in zip(prompts, settings, strict=True)]
    with tiny(
        tiny_model, async_scheduling=overlap, num_gpu_blocks_override=16, max_num_batched_tokens=32
    ) as llm:
        engine = llm.engine
        done: dict[int, list[int]] = {}
        aborted = set()
        waiting = list(range(40))
        while waiting or engine.has_work():
            for _ in range(draw(3)):
                if waiting:
                    index = waiting.pop()
                    engine.add_request(str(index), prompts[index], settings[index])
            if draw(10) == 0:
                victim = draw(40)
                aborted |= {int(output.request_id) for output in engine.abort([str(victim)])}
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id)] = output.outputs[0].token_ids
        assert llm.engine.core.stats().num_preemptions > 0
    assert set(done) | aborted == set(range(40))
    assert all(found == solo[index] for index, found in done.items())


def test_duplicate_request_id_is_refused(overlap: bool, tiny_model: Path) -> None:
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        llm.engine.add_request("same", [1, 2], PARAMS)
        with pytest.raises(InvalidRequestError, match="request_id"):
            llm.engine.add_request("same", [1, 2], PARAMS)


def test_long_prefill_does_not_stop_running_streams(overlap: bool, tiny_model: Path) -> None:
    """Every step of a 400-token prefill also decodes the running request (ITL is bounded)."""
    with tiny(tiny_model, async_scheduling=overlap, max_num_batched_tokens=32) as llm:
        engine = llm.engine
        engine.add_request("stream", [3, 4], params(max_tokens=60))
        for _ in range(6):
            engine.step()
        engine.add_request("long", list(range(3, 403)), params(max_tokens=1))
        steps = []
        while engine.has_work():
            steps.append({output.request_id for output in engine.step()})
        until = next(index for index, ids in enumerate(steps) if "long" in ids)
        assert until >= 12
        assert all("stream" in ids for ids in steps[:until])
