"""One kind of step, brought about and measured: what it takes, what the host does, what the GPU does.

First without a profiler (step and host times), then a few more steps under torch.profiler, which slows
the host and puts a little between the kernels of a graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from octavo.bench.offline import exactly, random_prompts
from octavo.bench.step_report import operation_rows
from octavo.bench.step_trace import Event, StepProfile, profile_steps, read_chrome_trace
from octavo.config.step_cost import machine_for, step_operations
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.outputs import RequestOutput, RequestOutputKind

WARMUP = 5  # decode steps
PROFILED = {"decode": 32, "prefill": 3}
"""Steps under the profiler, at most."""
SKIPPED = {"decode": 2, "prefill": 0}
"""Of these, not in the table: the first ones after the profiler has started meet an idle GPU."""
HOST_PARTS = ("schedule", "launch", "collect", "update")
Times = dict[str, list[float]]
"""Microseconds, a list over the steps, of: each of HOST_PARTS; the rest of the loop; "work", what the
host's processors do for a step: all of these but collect, which waits; and the whole "step"."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepKind:
    """Which step to measure: one that runs whole prompts, or one token of each request."""

    phase: str
    """ "prefill" or "decode"."""
    batch_size: int
    context: int
    """Tokens of a prompt, or of a request after the first counted decode step."""
    temperature: float = 0.0

    def requests(self, seq_len: int) -> list[tuple[int, int]]:
        """(query_len, seq_len) of each, for `step_operations`."""
        return [(seq_len if self.phase == "prefill" else 1, seq_len)] * self.batch_size


@contextmanager
def host_clock(core: Any) -> Iterator[dict[str, float]]:
    """Seconds spent in an EngineCore's calls are added up in what is yielded, to be cleared a step.

    The clocks are put around the calls, and taken away at the end. On a CPU, launch runs on the
    executor's thread: what other threads than this one spend counts as "beside", not under its name.
    """
    spent = dict.fromkeys((*HOST_PARTS, "beside"), 0.0)
    executor = core._executor
    execute = executor.execute
    loop = threading.get_ident()

    def clock(owner: Any, name: str) -> Any:
        function = getattr(owner, name)

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                where = name if threading.get_ident() == loop else "beside"
                spent[where] += time.perf_counter() - start

        setattr(owner, name, call)
        return owner

    calls = [(core.scheduler, "schedule"), (executor._worker, "launch"), (core.scheduler, "update")]
    for owner, name in calls + [(pending, "collect") for _, pending in core._in_flight]:
        clock(owner, name)
    executor.execute = lambda plan: clock(execute(plan), "collect")
    try:
        yield spent
    finally:
        del executor.execute
        for owner, name in calls:
            delattr(owner, name)


def time_steps(core: Any, steps: int, run: Callable[[], float]) -> Times:
    """Times of `steps` calls of `run`, which does one step and returns its seconds."""
    times: Times = {}
    with host_clock(core) as spent:
        for _ in range(steps):
            seconds = run()
            parts = spent.copy()
            spent.update(dict.fromkeys(spent, 0.0))
            beside = parts.pop("beside")
            parts["rest"] = seconds - sum(parts.values())
            parts["launch"] += beside
            parts["work"] = seconds - parts["collect"] + beside
            parts["step"] = seconds
            for name, value in parts.items():
                times.setdefault(name, []).append(value * 1e6)
    return times


def num_tokens(output: RequestOutput) -> int:
    """Tokens that a request has had. Raises OctavoError if it failed, or got none with this output."""
    if (error := output.outputs[0].error) is not None:
        raise OctavoError(f"a request failed: {error}")
    if not output.outputs[0].token_ids:
        raise OctavoError(f"{output.request_id} got no token in a step")
    assert output.metrics is not None
    return output.metrics.num_generation_tokens


class Batch:
    """Equal requests that run together, from their prefill on; `close` leaves nothing behind.

    A step is timed without a look into its outputs, which would count as the engine's work.
    """

    def __init__(
        self, llm: LLM, kind: StepKind, prompt_len: int, max_tokens: int, seed: int
    ) -> None:
        self._engine = llm.engine
        self._ids = [f"step-{seed}-{index}" for index in range(kind.batch_size)]
        self._outputs: list[RequestOutput] = []
        params = exactly(max_tokens, kind.temperature)
        vocab_size = llm.engine.config.model.vocab_size
        prompts = random_prompts([prompt_len] * kind.batch_size, vocab_size, seed)
        for name, prompt in zip(self._ids, prompts, strict=True):
            self._engine.add_request(name, prompt, params, output_kind=RequestOutputKind.DELTA)
        self._last = time.perf_counter()

    def prefill(self) -> None:
        """Run until each request has a token. Raises OctavoError if one fails."""
        waiting = set(self._ids)
        while waiting:
            waiting -= {out.request_id for out in self._engine.step() if num_tokens(out)}

    def step(self) -> float:
        """Run the loop once. Returns seconds since the last call; raises OctavoError unless each
        request gets something, which is for `check` to look at."""
        before, self._outputs = self._outputs, self._engine.step()
        if len(self._outputs) != len(self._ids):
            for output in before + self._outputs:
                num_tokens(output)  # what failed before is missing now
            raise OctavoError(f"a step ran {len(self._outputs)} of {len(self._ids)} requests")
        start, self._last = self._last, time.perf_counter()
        return self._last - start

    def check(self) -> float:
        """Tokens that a request has had by the last step, in the mean.

        Raises OctavoError if one failed, in this step or, since `step` counts, in any before.
        """
        return statistics.fmean(map(num_tokens, self._outputs))

    def close(self) -> None:
        """End the requests and wait for what is launched."""
        self._engine.abort(self._ids)
        self._engine.drain()


def record(run: Callable[[], None]) -> list[Event]:
    """What the GPU does while `run` runs, to the end of what it queues."""
    # As torch does for its own CUDA graphs: with graphs, CUPTI must not be taken down in between.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return read_chrome_trace(path)


def check_fits(llm: LLM, kind: StepKind, steps: int) -> None:
    """Raises OctavoError, with the numbers, if the engine cannot run such a step so often."""
    limits, block_size = llm.engine.config.scheduler, llm.engine.config.cache.block_size
    query_len, length = kind.requests(kind.context)[0][0], kind.context + 1
    if kind.phase == "decode":  # the first requests decode while the last ones are still in prefill
        length += kind.batch_size * kind.context // limits.max_num_batched_tokens
        length += steps + PROFILED["decode"] + 3 * WARMUP
    blocks = kind.batch_size * -(-length // block_size) + 1
    for need, name, limit in (
        (kind.batch_size, "max_num_seqs", limits.max_num_seqs),
        (kind.batch_size * query_len, "max_num_batched_tokens", limits.max_num_batched_tokens),
        (query_len, "long_prefill_token_threshold", limits.long_prefill_token_threshold or length),
        (length, "max_model_len", limits.max_model_len),
        (blocks, "KV blocks", llm.engine.core.num_blocks),
    ):
        if need > limit:
            raise OctavoError(
                f"{steps} {kind.phase} steps of {kind.batch_size} x {kind.context} tokens need "
                f"{need} {name}; this engine has {limit}"
            )


def measure_decode(llm: LLM, kind: StepKind, steps: int) -> tuple[Times, list[Event], int]:
    """Decode steps of equal requests: `steps` of them timed, then some recorded.

    Returns both, and the tokens of a request after a recorded step, in the mean.
    """
    prompt_len = max(1, kind.context - WARMUP - 1)
    room = llm.engine.config.scheduler.max_model_len - prompt_len
    num_recorded = min(steps, PROFILED["decode"]) + SKIPPED["decode"]
    with closing(Batch(llm, kind, prompt_len, room, seed=0)) as batch:

        def run() -> None:
            for _ in range(num_recorded):
                batch.step()
            batch.check()
            batch.close()  # within the record, so that its last step is whole

        batch.prefill()
        for _ in range(WARMUP):
            batch.step()
        times = time_steps(llm.engine.core, steps, batch.step)
        seq_len = prompt_len + round(batch.check())
        return times, record(run), seq_len + SKIPPED["decode"] + num_recorded // 2


def measure_prefill(llm: LLM, kind: StepKind, steps: int) -> tuple[Times, list[Event], int]:
    """As `measure_decode`: steps of whole prompts, each of fresh tokens and with nothing in flight."""
    seeds = itertools.count()

    def prefill() -> Times:
        with closing(Batch(llm, kind, kind.context, max_tokens=1, seed=next(seeds))) as batch:
            times = time_steps(llm.engine.core, 1, batch.step)
            batch.check()
            return times

    def run() -> None:
        for _ in range(min(steps, PROFILED["prefill"])):
            prefill()

    prefill()
    timed = [prefill() for _ in range(steps)]
    times = {name: [one[name][0] for one in timed] for name in timed[0]}
    return times, record(run), kind.context


def run_step(llm: LLM, kind: StepKind, steps: int) -> tuple[dict[str, Any], StepProfile]:
    """Measure on this GPU. Returns what goes into the JSON line, and the profile for a picture.

    Times in microseconds. Raises OctavoError for a step that the engine cannot run.
    """
    check_fits(llm, kind, steps)
    measure = measure_prefill if kind.phase == "prefill" else measure_decode
    times, events, seq_len = measure(llm, kind, steps)
    model = llm.engine.config.model
    try:
        found = profile_steps(events, model.num_layers, SKIPPED[kind.phase])
    except ValueError as error:
        raise OctavoError(f"the profiler saw too little: {error}") from None
    if kind.phase == "prefill":  # in between, the next prompts are made
        found.figures["idle_us"] = None
    machine = machine_for(torch.cuda.get_device_name())
    requests = kind.requests(seq_len)
    costs = step_operations(model, requests, kind.batch_size)
    p10, step_us, p90 = (float(each) for each in np.percentile(times.pop("step"), (10, 50, 90)))
    return {
        **dataclasses.asdict(kind),
        "mean_seq_len": seq_len,
        "weight_bytes": model.weight_bytes(),
        "steps": steps,
        "step_us": {"median": step_us, "p10": p10, "p90": p90},
        "tokens_per_s": sum(query_len for query_len, _ in requests) / step_us * 1e6,
        "host_us": {name: statistics.median(values) for name, values in times.items()},
        "ceiling_us": sum(cost.ceiling_s(machine) for cost in costs) * 1e6,
        "machine": dataclasses.asdict(machine),
        "profile": {**found.figures, "operations": operation_rows(costs, machine, found.times)},
    }, found
