"""The engine on the GPU: tokens and logprob bits depend on nothing but the request.

All with the `fixed` linear backend, bf16 but for one. Every variant is compared with each request
run alone, cold, eager and without overlap.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.engines import SHAPES, engine, fingerprint, model_folder, sampling, token_prompts

from octavo import SamplingParams
from octavo.core.scheduler_output import SchedulerOutput
from octavo.errors import ConfigError
from octavo.worker.model_runner import LaunchedStep

LENGTHS = [1, 16, 17, 255, 256, 257, 700, 2300, 40, 63]
PARAMS = [sampling(index) for index in range(len(LENGTHS))]
PROMPTS = token_prompts(LENGTHS, seed=0)
PLAIN = {"enable_prefix_caching": False, "async_scheduling": False, "enforce_eager": True}


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("gpu"), request.param)


@pytest.fixture(scope="module")
def solo(model: Path) -> list[Any]:
    return one_by_one(model)


def one_by_one(model: Path, **settings: Any) -> list[Any]:
    """Fingerprints of all requests, each run alone, cold, eager and without overlap."""
    with engine(model, max_num_batched_tokens=4096, **PLAIN, **settings) as llm:
        return [
            fingerprint(llm.generate(prompt, params, use_tqdm=False)[0])
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


def together(llm: Any, order: list[int] | None = None) -> list[Any]:
    """Fingerprints of all requests run in one batch, listed by index."""
    order = order or list(range(len(PROMPTS)))
    outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], use_tqdm=False)
    prints = dict(zip(order, map(fingerprint, outputs), strict=True))
    return [prints[i] for i in sorted(order)]


def test_the_comparison_can_fail(solo: list[Any]) -> None:
    assert len({tokens for tokens, _ in solo}) == len(LENGTHS)
    assert len({bits for _, bits in solo}) == len(LENGTHS)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_batched_equals_solo(eager: bool, overlap: bool, model: Path, solo: list[Any]) -> None:
    with engine(model, enforce_eager=eager, async_scheduling=overlap) as llm:
        assert together(llm) == solo


@pytest.mark.parametrize("chunk", [37, 501, 2048])
def test_chunked_equals_solo(chunk: int, model: Path, solo: list[Any]) -> None:
    with engine(
        model, long_prefill_token_threshold=chunk, max_num_seqs=16, enable_prefix_caching=False
    ) as llm:
        assert together(llm) == solo


def test_warm_equals_cold(model: Path, solo: list[Any]) -> None:
    with engine(model) as llm:
        assert together(llm) == solo
        cold = llm.engine.core.stats()
        assert together(llm, list(reversed(range(len(PROMPTS))))) == solo
        warm = llm.engine.core.stats()
        hits = warm.prefix_cache_hits - cold.prefix_cache_hits
        assert hits > 0.8 * (warm.prefix_cache_queries - cold.prefix_cache_queries)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_preempted_equals_solo(overlap: bool, model: Path, solo: list[Any]) -> None:
    blocks = sum(-(-length // 16) for length in LENGTHS)
    with engine(
        model,
        num_gpu_blocks_override=blocks + 4,
        max_model_len=None,
        enable_prefix_caching=False,
        async_scheduling=overlap,
    ) as llm:
        assert together(llm) == solo
        assert llm.engine.core.stats().num_preemptions > 0


@pytest.mark.parametrize("mates", [1, 7, 31, 100, 245])
def test_random_mates_change_nothing(mates: int, model: Path, solo: list[Any]) -> None:
    """Requests of other lengths, with other sampling, that come and go around ours."""
    rng = random.Random(mates)
    lengths = [rng.choice([1, 5, 30, 100, 300, 900]) for _ in range(mates)]
    others = token_prompts(lengths, seed=mates)
    with engine(model) as llm:
        prompts = [*PROMPTS, *others]
        params = [*PARAMS, *(sampling(i, rng.randint(1, 60)) for i in range(mates))]
        order = list(range(len(prompts)))
        rng.shuffle(order)
        outputs = llm.generate(
            [prompts[i] for i in order], [params[i] for i in order], use_tqdm=False
        )
        prints = dict(zip(order, map(fingerprint, outputs), strict=True))
    assert [prints[i] for i in range(len(PROMPTS))] == solo


def test_poisoned_padding_never_reaches_a_live_row(model: Path, solo: list[Any]) -> None:
    """Padding tokens have id 0; with NaN as its embedding every padding row is NaN all the way."""
    with engine(model) as llm:
        worker = llm.engine.core._executor._worker
        worker._model.embed_tokens.weight[0] = float("nan")
        torch.cuda.synchronize()
        some = [0, 2, 3]
        assert worker._runner._graphs.bucket(len(some)) > len(some), "no step is padded"
        assert together(llm, some) == [solo[i] for i in some]


def test_one_failing_request_fails_alone(model: Path, solo: list[Any]) -> None:
    """A token whose embedding is NaN makes its request's logits NaN, and nobody else's."""
    with engine(model) as llm:
        worker = llm.engine.core._executor._worker
        unused = next(
            token
            for token in range(1, 4096)
            if all(token not in prompt["prompt_token_ids"] for prompt in PROMPTS)
            and all(token not in tokens for tokens, _ in solo)
        )
        worker._model.embed_tokens.weight[unused] = float("nan")
        torch.cuda.synchronize()
        bad = {"prompt_token_ids": [5, unused, 7]}
        outputs = llm.generate([*PROMPTS[:4], bad], [*PARAMS[:4], sampling(0)], use_tqdm=False)
        assert outputs[-1].outputs[0].finish_reason == "error"
        assert "NaN" in str(outputs[-1].outputs[0].error)
        assert [fingerprint(output) for output in outputs[:4]] == solo[:4]


@pytest.mark.parametrize("chunk", [0, 101])
def test_nan_reaches_no_text_before_it(model: Path, chunk: int) -> None:
    """Blocks of a failing request are hits for others, up to the token that is NaN."""
    with engine(model, long_prefill_token_threshold=chunk) as llm:
        head = [20 + 7 * i % 900 for i in range(40)]
        good, bad = [*head, 60, 61, 62], [*head, 4000, *[50] * 300]
        worker = llm.engine.core._executor._worker
        worker._model.embed_tokens.weight[4000] = float("nan")
        torch.cuda.synchronize()
        prompts = [{"prompt_token_ids": one} for one in (good, bad, good)]
        settings = SamplingParams(
            temperature=0.0, max_tokens=5, logprobs=1, detokenize=False, ignore_eos=True
        )
        alone = llm.generate(prompts[0], settings, use_tqdm=False)[0]
        assert llm.reset_prefix_cache()
        failing, after = (llm.generate(p, settings, use_tqdm=False)[0] for p in prompts[1:])
        assert failing.outputs[0].finish_reason == "error"
        assert not chunk or after.num_cached_tokens >= 32  # one step that fails offers no block
        assert fingerprint(after) == fingerprint(alone)


def test_prompt_scores_equal_alone_and_chunked(model: Path) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=2, prompt_logprobs=2, detokenize=False, ignore_eos=True
    )
    with engine(model) as llm:
        together_ = llm.generate(PROMPTS[3:8], params, use_tqdm=False)
    with engine(model, long_prefill_token_threshold=37, **PLAIN) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS[3:8]]
    for a, b in zip(together_, alone, strict=True):
        assert a.prompt_logprobs is not None
        assert a.prompt_logprobs == b.prompt_logprobs


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_nothing_is_compiled_while_serving(mode: str, model: Path) -> None:
    """After start every kernel variant exists, whatever comes. In a process of its own: this one has
    the kernels of other tests."""
    command = [sys.executable, "-m", "tests.gpu.watch_compilations", str(model), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert not compiled, "compiled while serving:\n" + "\n".join(compiled)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("index", [0, 1, 3], ids=["greedy", "seeded", "cut"])
def test_launching_a_decode_step_waits_for_nothing(eager: bool, index: int, model: Path) -> None:
    """torch raises where the launch of a step without arrivals or departures would synchronise."""
    num_checked = 0
    with engine(model, enforce_eager=eager) as llm:
        worker = llm.engine.core._executor._worker
        launch = worker.launch

        def strict(plan: SchedulerOutput) -> LaunchedStep:
            nonlocal num_checked
            if plan.new_requests or plan.removed_request_ids:
                return launch(plan)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                num_checked += 1

        params = [sampling(index, 40)] * 5
        expected = llm.generate(PROMPTS[:5], params, use_tqdm=False)
        worker.launch = strict
        outputs = llm.generate(PROMPTS[:5], params, use_tqdm=False)
    assert [fingerprint(output) for output in outputs] == list(map(fingerprint, expected))
    assert num_checked >= 35  # of 40; 40 tokens also take new blocks


def test_fp16_batched_and_chunked_equal_solo(tmp_path: Path) -> None:
    model = model_folder(tmp_path, "llama")
    solo = one_by_one(model, dtype="float16")
    for settings in ({}, {"long_prefill_token_threshold": 37, "enable_prefix_caching": False}):
        with engine(model, dtype="float16", **settings) as llm:
            assert llm.engine.config.model.dtype == "float16"
            assert together(llm) == solo


def test_what_does_not_fit_is_told(model: Path) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        with engine(model, num_gpu_blocks_override=None, gpu_memory_utilization=0.001):
            pass
    with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
        with engine(model, num_gpu_blocks_override=2**30):
            pass


def test_aborts_and_arrivals_leave_nothing_behind(model: Path) -> None:
    """Streams closed half-way by several threads, while others run."""
    with engine(model, max_num_seqs=32) as llm:
        before = torch.cuda.memory_allocated()

        def client(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(6):
                prompts = token_prompts([rng.choice([1, 50, 400]) for _ in range(3)], seed)
                stream = llm.stream(prompts, sampling(rng.randrange(8), 40))
                for _ in range(rng.randrange(1, 30)):
                    next(stream, None)
                stream.close()

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        llm.engine.drain()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_interrupt_loses_only_the_call(model: Path) -> None:
    """Ctrl-C in the middle of a generation, then the engine answers as before."""
    script = f"""
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.gpu.engines import *
from pathlib import Path
with engine(Path({str(model)!r})) as llm:
    prompts = token_prompts([100] * 8, 1)
    expected = [fingerprint(o) for o in llm.generate(prompts, sampling(0), use_tqdm=False)]
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        llm.generate(prompts, sampling(0, 3000), use_tqdm=False)
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        pass
    again = [fingerprint(o) for o in llm.generate(prompts, sampling(0), use_tqdm=False)]
    assert again == expected
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
