"""Minutes of random traffic on one engine, and whether it is as it was before.

    PYTHONPATH=src:. python3 benchmarks/gpu_soak.py --minutes 8 --out soak.json

Requests of all lengths and sampling features come in bursts and lulls, from an open loop of
LLMEngine.add_request/step/abort and from threads with LLM.stream/generate; they are aborted in
every state, and some are invalid. The pool is small, so requests are preempted. Exit status 1 if a
verdict in the JSON document is false. `--device cpu --minutes 1` is a check of this program.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import heapq
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from benchmarks.soak_traffic import SCALES, Job, Scale, Tally, invalid_request, make_job
from tests.gpu.engines import model_folder

from octavo import LLM, SamplingParams
from octavo.bench.provenance import describe
from octavo.errors import InvalidRequestError
from octavo.outputs import FinishReason, RequestOutput, RequestOutputKind

NUM_CLIENTS = 4
SAMPLE_SECONDS = 5.0
SETTLE_SECONDS = 60.0  # before this samples do not count: arenas and caches are still filling
JUDGED_MINUTES = 2.0  # of samples, at least, for a verdict on the slope
MAX_RSS_SLOPE = 1.0  # MB a minute
MAX_GPU_BYTES = 10_000_000_000  # other tests run on the same GPU
BYTES_TOLERANCE = 1 << 20
TOLERANCE_REASON = (
    "the sampler keeps the index tensors of its last plan, KBs that depend on the last rows; a row "
    "of fp32 logits (16 KB) lost in one of a hundred requests would exceed it in 6400 requests"
)
ABORT_DELAYS = (0.0, 0.001, 0.01, 0.1, 0.5, 2.0)
GIVE_UP_SECONDS = 60.0  # over the planned time all stacks are printed, for the engine hangs


class Soak:
    """Traffic on one engine. `counts` and `kept` are shared by all threads, under the lock."""

    def __init__(self, llm: LLM, scale: Scale, seconds: float) -> None:
        self.llm, self.scale, self.seconds = llm, scale, seconds
        self.counts: Counter[str] = Counter()
        self.kept: dict[int, bytes] = {}
        """Digests of finished requests by job number."""
        self.failures: list[str] = []
        self.samples: list[dict[str, float]] = []
        self._numbers = count()
        self._lock = threading.Lock()
        self._start = 0.0
        self._live: dict[str, Tally] = {}  # the open loop's own, as the next two
        self._deadlines: list[tuple[float, str]] = []
        self._rng = random.Random("open loop")

    @property
    def elapsed(self) -> float:
        """Seconds of traffic so far."""
        return time.monotonic() - self._start

    @property
    def over(self) -> bool:
        """No more arrivals."""
        return self.elapsed >= self.seconds or bool(self.failures)

    def warm_up(self) -> None:
        """All features at once and the longest queue: what is allocated once is allocated now."""
        jobs = [make_job(-1 - number, self.scale) for number in range(2 * self.scale.max_live)]
        scored = SamplingParams(max_tokens=2, prompt_logprobs=1, detokenize=False)
        self.llm.generate(
            [*(job.prompt for job in jobs), jobs[0].prompt],
            [*(job.params for job in jobs), scored],
            use_tqdm=False,
        )

    def run(self) -> None:
        """All the traffic, to the last answer. What goes wrong is in `failures`."""
        faulthandler.dump_traceback_later(self.seconds + GIVE_UP_SECONDS, exit=True)
        self._start = time.monotonic()
        clients = [threading.Thread(target=self._client, args=(i,)) for i in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        try:
            self._open_loop()
        except Exception:
            self.fail()
        for client in clients:
            client.join()

    def fail(self) -> None:
        """Note the exception that is being handled; the traffic ends."""
        with self._lock:
            self.failures.append(traceback.format_exc(limit=8))

    def _count(self, *names: str) -> None:
        with self._lock:
            self.counts.update(names)

    def _next_job(self) -> Job:
        self._count("submitted")
        return make_job(next(self._numbers), self.scale)

    def _ended(self, tally: Tally) -> None:
        """A request got its last output."""
        reasons = {str(reason) for reason in tally.reasons.values()}
        whole = not reasons & {FinishReason.ABORT, FinishReason.ERROR}
        with self._lock:
            self.counts.update(["ended", *(f"ended by {reason}" for reason in sorted(reasons))])
            self.counts["output tokens"] += tally.num_tokens
            self.failures += tally.errors
            if whole and tally.job.repeatable:
                self.counts["repeatable"] += 1
                if self.counts["repeatable"] % self.scale.keep_every == 0:
                    self.kept[tally.job.number] = tally.digest()

    def _client(self, index: int) -> None:
        rng = random.Random(f"client {index}")
        try:
            while not self.over:
                if self.scale.rate_at(self.elapsed) == 0.0:
                    time.sleep(0.05)
                else:
                    self._call(rng)
        except Exception:
            self.fail()

    def _call(self, rng: random.Random) -> None:
        """A few prompts through LLM.generate or LLM.stream, maybe left half-way."""
        jobs = [self._next_job() for _ in range(rng.choice((1, 1, 2, 4)))]
        tallies = [Tally(job) for job in jobs]
        prompts, params = [job.prompt for job in jobs], [job.params for job in jobs]
        if rng.random() < 0.3:
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            for tally, output in zip(tallies, outputs, strict=True):
                tally.add(output)
                self._ended(tally)
            return
        patience = rng.choice((None, None, rng.randint(1, 60)))
        stream = self.llm.stream(prompts, params)
        for number, output in enumerate(stream, 1):
            tally = tallies[int(output.request_id)]
            tally.add(output)
            if tally.finished:
                self._ended(tally)
            if number == patience:
                self._count(*("closed" for tally in tallies if not tally.finished))
                if rng.random() < 0.5:
                    stream.close()
                return  # or whoever collects the stream closes it

    def _open_loop(self) -> None:
        engine = self.llm.engine
        credit, before, next_sample = 0.0, self.elapsed, 0.0
        while not self.over or self._live:
            now = self.elapsed
            credit = min(credit + (now - before) * self.scale.rate_at(now), self.scale.max_live)
            before = now
            while credit >= 1.0 and len(self._live) < self.scale.max_live and not self.over:
                credit -= 1.0
                self._arrive()
            self._abort_due(now)
            if self._live or engine.has_work():  # other threads' turns bring our news too
                self._receive(engine.step())
            else:
                time.sleep(0.002)
            if now >= next_sample:
                self.samples.append(self._sample(now))
                next_sample += SAMPLE_SECONDS

    def _arrive(self) -> None:
        rng, engine = self._rng, self.llm.engine
        if rng.random() < 0.05:
            self._try_invalid()
        job = self._next_job()
        request_id = f"open-{job.number}"
        kind = RequestOutputKind.DELTA if job.number % 4 else RequestOutputKind.FINAL_ONLY
        engine.add_request(request_id, job.prompt, job.params, output_kind=kind)
        self._live[request_id] = Tally(job)
        if rng.random() < 0.25:
            delay = rng.choice(ABORT_DELAYS)
            heapq.heappush(self._deadlines, (self.elapsed + delay, request_id))

    def _try_invalid(self) -> None:
        """A request that must be refused and leave no trace; or an id that is in use."""
        rng, engine = self._rng, self.llm.engine
        prompt, settings = invalid_request(rng, self.scale)
        request_id = "invalid"
        if self._live and rng.random() < 0.2:
            # An id of the traffic might end between the look and the call; this one lives longer.
            longest = self.scale.max_model_len - 10
            settings = {"max_tokens": longest, "min_tokens": longest}
            request_id, prompt = "twice", [1] * 10
            engine.add_request(request_id, prompt, SamplingParams(**settings, detokenize=False))
        try:
            engine.add_request(request_id, prompt, SamplingParams(**settings))
        except InvalidRequestError:
            self._count("refused")
        else:
            self.failures.append(f"not refused: {prompt!r:.80} {settings}")
        if request_id == "twice":
            engine.abort(request_id)

    def _abort_due(self, now: float) -> None:
        """Abort in whatever state the request is, now and then twice, or long after its end."""
        engine, rng = self.llm.engine, self._rng
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            self._count(f"aborted while {self._state_of(request_id)}")
            last = engine.abort([request_id, "unknown"])
            self._receive(engine.step())  # first what other threads' turns had brought before
            self._receive(last)
            if rng.random() < 0.3:
                assert not engine.abort(request_id), "aborted twice"

    def _state_of(self, request_id: str) -> str:
        tally = self._live.get(request_id)
        if tally is None:
            return "ended"
        requests = self.llm.engine.core.scheduler.state.requests
        request = requests.get(request_id) or requests.get(f"{request_id}/0")
        if request is None:
            return "ended in part"
        state = request.status.name.lower()
        return f"{state} with output" if request.output_token_ids else state

    def _receive(self, outputs: Iterable[RequestOutput]) -> None:
        """News of the open loop; a KeyError is news of a request that had ended."""
        for output in outputs:
            if output.request_id == "twice":
                continue
            tally = self._live[output.request_id]
            tally.add(output)
            if tally.finished:
                self._ended(self._live.pop(output.request_id))

    def _sample(self, now: float) -> dict[str, float]:
        stats = self.llm.engine.core.stats()
        return {
            **memory(),
            "seconds": round(now, 2),
            "free_blocks": stats.num_free_blocks,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "preemptions": stats.num_preemptions,
            "submitted": self.counts["submitted"],
            "ended": self.counts["ended"],
        }


def memory() -> dict[str, int]:
    """Bytes of this process, and of torch on the GPU."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "torch_allocated": torch.cuda.memory_allocated(),
        "torch_reserved": torch.cuda.memory_reserved(),
    }


def at_rest(llm: LLM) -> dict[str, int]:
    """What the engine holds with nothing to do. AssertionError if its books are wrong."""
    llm.engine.drain()
    core = llm.engine.core
    core.scheduler.check_integrity()
    assert core.scheduler.is_idle_clean()
    runner = core._executor._worker._runner
    assert runner is not None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    free = {"free_blocks": core.stats().num_free_blocks, "free_slots": len(runner.slots._free)}
    return {**free, **memory()}


def repeat(soak: Soak, seconds: float) -> dict[str, Any]:
    """Kept requests once more, each alone and cold; as many as there is time for."""
    faulthandler.dump_traceback_later(seconds + GIVE_UP_SECONDS, exit=True)
    numbers = sorted(soak.kept)
    random.Random(0).shuffle(numbers)
    until = time.monotonic() + seconds
    different, done = [], 0
    for number in numbers:
        if time.monotonic() > until:
            break
        soak.llm.reset_prefix_cache()
        tally = Tally(make_job(number, soak.scale))
        tally.add(soak.llm.generate(tally.job.prompt, tally.job.params, use_tqdm=False)[0])
        done += 1
        if tally.digest() != soak.kept[number]:
            different.append(number)
    return {"kept": len(numbers), "repeated": done, "different": different}


def slope(samples: list[dict[str, float]], since: float) -> float | None:
    """MB a minute of RSS, least squares over the samples from `since` seconds on, if enough."""
    points = [(one["seconds"] / 60, one["rss"] / 1e6) for one in samples if one["seconds"] >= since]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def judge(
    soak: Soak, before: dict[str, int], settle: float, repeat_seconds: float
) -> dict[str, Any]:
    """Figures and verdicts, after the traffic."""
    after = at_rest(soak.llm)
    stats = soak.llm.engine.core.stats()
    repeated = repeat(soak, repeat_seconds)
    at_end = at_rest(soak.llm)
    counts, rate = soak.counts, slope(soak.samples, settle)
    grown = after["torch_allocated"] - before["torch_allocated"]
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    states = sum(name.startswith("aborted while") for name in counts)
    rare = (stats.num_preemptions, stats.prefix_cache_hits, counts["refused"], counts["closed"])
    verdicts = {
        "no failure": not soak.failures,
        "torch bytes back": abs(grown) <= BYTES_TOLERANCE,
        "blocks and slots back": all(
            before[name] == after[name] == at_end[name] for name in ("free_blocks", "free_slots")
        ),
        "repeated alone: same tokens and scores": bool(repeated["repeated"])
        and not repeated["different"],
        "every request ended": counts["ended"] + counts["closed"] == counts["submitted"],
        "met preemption, hits, refusals, closed streams, aborts in 4 states": min(rare) > 0
        and states >= 4,
        "gpu bytes": peak <= MAX_GPU_BYTES,
    }
    if soak.seconds - settle >= 60 * JUDGED_MINUTES:
        verdicts["rss slope"] = rate is not None and rate < MAX_RSS_SLOPE
    return {
        "verdicts": verdicts,
        "rss_slope_mb_per_min": rate,
        "rss_slope_of_second_half": slope(soak.samples, soak.seconds / 2),
        "torch_bytes_grown": grown,
        "torch_bytes_tolerance": f"{BYTES_TOLERANCE}: {TOLERANCE_REASON}",
        "torch_peak_reserved": peak,
        "at_rest": {"after warm-up": before, "after traffic": after, "at the end": at_end},
        "preemptions": stats.num_preemptions,
        "prefix_cache_hit_tokens": stats.prefix_cache_hits,
        "counts": dict(sorted(counts.items())),
        "repeated": repeated,
        "failures": soak.failures[:10],
        "samples": soak.samples,
    }


def main() -> int:
    """One JSON document; exit status 1 if a verdict is false."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--repeat-seconds", type=float, default=25.0)
    parser.add_argument("--device", choices=list(SCALES), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.pop("OCTAVO_CHECK_INTEGRITY", None)  # it would dominate every step
    seconds, scale = 60 * args.minutes, SCALES[args.device]
    settle = min(SETTLE_SECONDS, seconds / 2)
    settings = {**scale.engine_settings(), "device": args.device}
    # All that others leave of a GPU may be used: the pool has a fixed size.
    gpu = {"linear_backend": "fixed", "gpu_memory_utilization": 1.0}
    settings |= gpu if args.device == "cuda" else {"dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        with LLM(str(model_folder(Path(folder), "qwen")), **settings) as llm:
            soak = Soak(llm, scale, seconds)
            soak.warm_up()
            before = at_rest(llm)
            soak.run()
            try:
                result = judge(soak, before, settle, args.repeat_seconds)
            except Exception:  # of a dead engine: the document says so
                soak.fail()
                result = {"verdicts": {"no failure": False}, "failures": soak.failures}
                result |= {"counts": dict(soak.counts), "samples": soak.samples}
    result |= {"minutes": args.minutes, "settings": settings, "provenance": describe()}
    args.out.write_text(json.dumps(result, indent=1))
    for name, good in result["verdicts"].items():
        print("ok   " if good else "WRONG", name)
    print(json.dumps({**result, "samples": len(result.get("samples", ()))}, indent=1))
    return 0 if all(result["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
