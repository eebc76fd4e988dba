"""The engine on a tiny model: leaks, faults, limits. Every test ends with nothing held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequestError
from octavo.outputs import RequestOutput
from octavo.worker.model_runner import ModelRunner

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)


def params(**changes: Any) -> SamplingParams:
    settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**settings, **changes})


@contextmanager
def tiny(model: Path, **settings: Any) -> Iterator[LLM]:
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 8}
    with LLM(str(model), **{**defaults, **settings}) as llm:
        yield llm
        core = llm.engine.core
        core.drain()
        assert core.scheduler.is_idle_clean()
        assert runner_of(llm).slots.num_free == core.config.scheduler.max_num_seqs


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.engine.core._executor._worker._runner
    assert runner is not None
    return runner


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run(llm: LLM, prompts: list[list[int]], *settings: SamplingParams) -> list[RequestOutput]:
    return llm.generate(
        prompts, settings[0] if len(settings) == 1 else list(settings), use_tqdm=False
    )


PROMPTS = [[3, 4, 5], list(range(10, 60)), [7] * 33, list(range(100, 229))]


@pytest.mark.parametrize("overlap", [False, True])
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


@pytest.mark.parametrize("overlap", [False, True])
def test_failing_step_fails_only_its_requests(
    overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that raises ends the requests of that step; the engine serves on."""
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        model = runner_of(llm)._model
        forward, calls = model.forward, []

        def flaky(*args: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("device said no")
            return forward(*args)

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", flaky)
            outputs = run(llm, PROMPTS, PARAMS)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 4
        assert all("device said no" in str(output.outputs[0].error) for output in outputs)
        assert tokens(run(llm, PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_in_one_request_ends_that_request_only(
    overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN hidden states of one request: it errors, its batch mates equal their solo runs, and its
    poisoned cache blocks do not reach whoever gets them next."""
    with tiny(
        tiny_model,
        async_scheduling=overlap,
        enable_prefix_caching=False,
        num_gpu_blocks_override=40,
    ) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        embed = runner_of(llm)._model.embed_tokens
        forward = embed.forward

        def poisoned(ids: torch.Tensor) -> torch.Tensor:
            return torch.where((ids == 7)[:, None], torch.nan, forward(ids))

        with monkeypatch.context() as patch:
            patch.setattr(embed, "forward", poisoned)
            outputs = run(llm, PROMPTS, PARAMS, PARAMS, params(prompt_logprobs=1), PARAMS)
            [scored] = run(llm, [PROMPTS[2]], params(prompt_logprobs=0, max_tokens=0))
        assert scored.outputs[0].finish_reason == "error"
        assert outputs[2].outputs[0].finish_reason == "error"
        assert "NaN" in str(outputs[2].outputs[0].error)
        for index in (0, 1, 3):
            assert outputs[index].outputs[0].token_ids == expected[index]
        for _ in range(3):
            assert tokens(run(llm, PROMPTS, PARAMS)) == expected


def test_prompt_as_long_as_the_context(tiny_model: Path) -> None:
    """Exactly the limit: scores only; one more or an output token: refused (case P02)."""
    with tiny(tiny_model, max_model_len=64) as llm:
        [output] = run(llm, [[9] * 64], params(max_tokens=0, prompt_logprobs=0))
        assert len(output.prompt_logprobs or []) == 64
        [output] = run(llm, [[9] * 63], params(max_tokens=5))
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="prompt"):
            run(llm, [[9] * 64], params(max_tokens=1))
        with pytest.raises(InvalidRequestError, match="prompt"):
            run(llm, [[9] * 65], params(max_tokens=0))


def test_pool_smaller_than_the_context_is_one_limit(tiny_model: Path) -> None:
    """Context 512, pool of 8 blocks: admission, and max_tokens, use what fits (case P03)."""
    with tiny(tiny_model, num_gpu_blocks_override=9) as llm:
        assert llm.engine.config.scheduler.max_model_len == 128
        with pytest.raises(InvalidRequestError, match="128"):
            run(llm, [[9] * 200], PARAMS)
        [output] = run(llm, [[9] * 100], params(max_tokens=None))
        assert len(output.outputs[0].token_ids) == 28


def test_aborts_in_every_state(tiny_model: Path) -> None:
    """Before it was scheduled, in prefill, in decode, when finished, twice, unknown (S08 to S10)."""
    with tiny(tiny_model, long_prefill_token_threshold=16, max_num_seqs=2) as llm:
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


def test_random_arrivals_and_aborts_equal_solo(tiny_model: Path) -> None:
    """Requests come and go at random under memory pressure; survivors equal their solo runs."""
    generator = torch.Generator().manual_seed(5)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    prompts = [[3 + draw(500) for _ in range(1 + draw(90))] for _ in range(40)]
    settings = [params(temperature=0.9, seed=index, max_tokens=1 + draw(24)) for index in range(40)]
    with tiny(tiny_model, enable_prefix_caching=False, async_scheduling=False) as llm:
        solo = [tokens(run(llm, [p], s))[0] for p, s in zip(prompts, settings, strict=True)]
    with tiny(tiny_model, num_gpu_blocks_override=16, max_num_batched_tokens=32) as llm:
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


def test_duplicate_request_id_is_refused(tiny_model: Path) -> None:
    with tiny(tiny_model) as llm:
        llm.engine.add_request("same", [1, 2], PARAMS)
        with pytest.raises(InvalidRequestError, match="request_id"):
            llm.engine.add_request("same", [1, 2], PARAMS)


def test_long_prefill_does_not_stop_running_streams(tiny_model: Path) -> None:
    """Every step of a 400-token prefill also decodes the running request (ITL is bounded)."""
    with tiny(tiny_model, max_num_batched_tokens=32) as llm:
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
