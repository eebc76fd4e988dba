"""The engine on a tiny model when something fails: who ends, who is not affected, what is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.core.request import EngineRequest
from octavo.errors import DeviceLostError, EngineDeadError
from octavo.executor import inline
from octavo.outputs import RequestOutput
from octavo.worker.model_runner import LaunchedStep
from tests.cpu.tiny.helpers import PARAMS, PROMPTS, params, run, runner_of, tiny, tokens

BYSTANDER = [9, 8, 7, 6]


def fail_at(call: int, function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The function, but its n-th call raises."""
    calls: list[int] = []

    def flaky(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise error
        return function(*args, **kwargs)

    return flaky


def drive(
    llm: LLM, steps: int = 10_000, last: dict[str, RequestOutput] | None = None
) -> dict[str, RequestOutput]:
    """Step until nothing is left to do, or so often; the last outputs by request id, in `last`."""
    last = {} if last is None else last
    for _ in range(steps):
        if not llm.engine.has_work():
            break
        last |= {output.request_id: output for output in llm.engine.step() if output.finished}
    return last


def test_failing_step_fails_only_its_requests(
    overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that raises ends the requests of that step, not one that came with the next."""
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        expected = tokens(run(llm, [*PROMPTS, BYSTANDER], PARAMS))
        model = runner_of(llm)._model
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", fail_at(3, model.forward, RuntimeError("said no")))
            for name, prompt in enumerate(PROMPTS):
                llm.engine.add_request(str(name), prompt, PARAMS)
            outputs = drive(llm, 2 if overlap else 3)  # the third step is launched by now
            llm.engine.add_request("4", BYSTANDER, PARAMS)
            outputs |= drive(llm)
        for name in "0123":
            assert outputs[name].outputs[0].finish_reason == "error"
            assert "said no" in str(outputs[name].outputs[0].error)
        assert outputs["4"].outputs[0].token_ids == expected[4]
        assert tokens(run(llm, [*PROMPTS, BYSTANDER], PARAMS)) == expected


@pytest.mark.parametrize("bad", range(3))
def test_request_that_cannot_be_admitted_ends_alone(
    bad: int, overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those admitted with it nor one of the next step notice."""
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        prompts = [*PROMPTS[:3], BYSTANDER]
        expected = tokens(run(llm, prompts, PARAMS))
        sampling = runner_of(llm)._sampling
        add = sampling.add

        def flaky(slot: int, request: EngineRequest) -> None:
            if request.prompt_token_ids == prompts[bad]:
                raise RuntimeError("no room for this one")
            add(slot, request)

        with monkeypatch.context() as patch:
            patch.setattr(sampling, "add", flaky)
            for name, prompt in enumerate(prompts[:3]):
                llm.engine.add_request(str(name), prompt, PARAMS)
            plan = llm.engine.core.scheduler.schedule
            plans = []

            [bystander] = llm.engine.process("3", BYSTANDER, PARAMS).engine_requests

            def then_bystander() -> Any:
                plans.append(plan())
                if len(plans) == 1:  # amid a turn: not by engine.add_request
                    outputs = llm.engine._outputs
                    outputs.add(outputs.prepare("3", None, [bystander]))
                    llm.engine.core.add_request(bystander)
                return plans[-1]

            patch.setattr(llm.engine.core.scheduler, "schedule", then_bystander)
            outputs = drive(llm)
        assert [new.request_id for new in plans[1].new_requests] == ["3"]
        for name, tokens_of in enumerate(expected):
            [completion] = outputs[str(name)].outputs
            if name == bad:
                assert completion.finish_reason == "error"
                assert "no room for this one" in str(completion.error)
            else:
                assert completion.token_ids == tokens_of
        assert tokens(run(llm, prompts, PARAMS)) == expected


def test_a_row_that_was_not_written_never_runs(
    overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If writing the slots fails, new rows still hold the block table of whoever had them before:
    running them in the next step would write into blocks of others."""
    with tiny(tiny_model, async_scheduling=overlap, enable_prefix_caching=False) as llm:
        [solo] = tokens(run(llm, [BYSTANDER], params(max_tokens=40)))
        run(llm, [PROMPTS[3]] * 8, PARAMS)  # every row has had a tenant
        llm.engine.add_request("stream", BYSTANDER, params(max_tokens=40))
        outputs = drive(llm, 3)
        slots = runner_of(llm).slots
        apply = slots._apply

        def flaky(writes: list[tuple[int, list[int]]]) -> None:
            if any(values == PROMPTS[3] for _, values in writes):
                raise RuntimeError("no copy")
            apply(writes)

        with monkeypatch.context() as patch:
            patch.setattr(slots, "_apply", flaky)
            llm.engine.add_request("new", PROMPTS[3], params(max_tokens=40))
            outputs |= drive(llm, 1)
            seen: list[int] = []
            prepare = runner_of(llm)._prepare

            def spy(scheduled: dict[str, int], sampling: set[str]) -> Any:
                seen.append(len(scheduled))
                return prepare(scheduled, sampling)

            patch.setattr(runner_of(llm), "_prepare", spy)
            outputs |= drive(llm)
        assert "no copy" in str(outputs["new"].outputs[0].error)
        assert not seen, "both were in the failed step"
        assert tokens(run(llm, [BYSTANDER], params(max_tokens=40))) == [solo]


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


@pytest.mark.parametrize("wait", [1, 2, 5, 8])
def test_interrupted_wait_loses_nothing(
    wait: int, overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while `step` waits for a result: the next step goes on as if nothing had been."""
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        for name, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(name), prompt, PARAMS)
        outputs: dict[str, RequestOutput] = {}
        with monkeypatch.context() as patch:
            patch.setattr(
                LaunchedStep, "wait", fail_at(wait, LaunchedStep.wait, KeyboardInterrupt())
            )
            with pytest.raises(KeyboardInterrupt):
                drive(llm, last=outputs)
        drive(llm, last=outputs)
        assert [outputs[name].outputs[0].token_ids for name in "0123"] == expected


def test_interrupted_generate_leaves_a_working_engine(
    overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        with monkeypatch.context() as patch:
            patch.setattr(LaunchedStep, "wait", fail_at(3, LaunchedStep.wait, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                run(llm, PROMPTS, PARAMS)
        assert tokens(run(llm, PROMPTS, PARAMS)) == expected


def test_dead_engine_says_so(overlap: bool, tiny_model: Path) -> None:
    """After shutdown: a stream that was left half-read, a step and a new request."""
    with LLM(
        str(tiny_model),
        load_format="dummy",
        skip_tokenizer_init=True,
        async_scheduling=overlap,
    ) as llm:
        engine = llm.engine
        stream = llm.stream(PROMPTS, PARAMS)
        next(stream)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            list(stream)
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.core.step(lambda news: None, nullcontext)
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.add_request("late", [1, 2], PARAMS)
        engine.abort(["late"])


@pytest.mark.parametrize("broken", ["schedule", "update", "execute", "process"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_half_applied_step_ends_the_engine(
    broken: str,
    error: BaseException,
    overlap: bool,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What escapes planning, settling or delivery is raised as it is, then every call names it."""
    with LLM(
        str(tiny_model),
        load_format="dummy",
        skip_tokenizer_init=True,
        async_scheduling=overlap,
    ) as llm:
        core = llm.engine.core
        owners = {"execute": core._executor, "process": llm.engine._outputs}
        owner = owners.get(broken, core.scheduler)
        monkeypatch.setattr(owner, broken, fail_at(2, getattr(owner, broken), error))
        with pytest.raises(type(error)):
            run(llm, PROMPTS, PARAMS)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=type(error).__name__):
                run(llm, PROMPTS, PARAMS)
            with pytest.raises(EngineDeadError, match=type(error).__name__):
                core.step(lambda news: None, nullcontext)


def test_failed_construction_leaves_no_thread(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the worker is raised as it is; whoever keeps it keeps no thread."""

    def broken(config: object) -> None:
        raise ValueError("no such weights")

    monkeypatch.setattr(inline, "Worker", broken)
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="no such weights") as caught:
        LLM(str(tiny_model), load_format="dummy", skip_tokenizer_init=True)
    for thread in set(threading.enumerate()) - before:
        thread.join(2)
    assert set(threading.enumerate()) <= before
    assert type(caught.value) is ValueError


def test_a_lost_device_ends_the_engine(
    overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step can succeed any more: one error at once and a dead engine, not an error a request."""
    with LLM(
        str(tiny_model), load_format="dummy", skip_tokenizer_init=True, async_scheduling=overlap
    ) as llm:
        worker = llm.engine.core._executor._worker

        def launch(plan: object) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(worker, "launch", launch)
        monkeypatch.setattr(worker, "diagnose", lambda error: DeviceLostError(f"lost: {error}"))
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            run(llm, PROMPTS, PARAMS)
        with pytest.raises(EngineDeadError, match="lost"):
            run(llm, PROMPTS, PARAMS)
