"""What the engine did, in numbers: counters and histograms.

Owns the definitions. TTFT: arrival to the first token of a request. ITL: each gap between two
tokens of one completion; tokens that arrive together have gaps of 0 between them, so the gaps of a
completion add up to last - first. TPOT: (last - first) / (n - 1) of a completion with n >= 2
tokens. E2E: arrival to the end of a request. Times are seconds of time.monotonic().
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.scheduler_output import SchedulerStats
from octavo.outputs import FinishReason, RequestMetrics

# vLLM's bounds, with finer low ends: small models on a fast GPU answer within milliseconds.
TTFT_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_TIME_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_TIME_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_COUNT_BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Histogram:
    """Counts of values by upper bound (value <= bound), with sum and count, as Prometheus has it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Per bucket, not cumulative; the last is over the largest bound."""
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> dict[str, Any]:
        counts = {"counts": list(self.counts), "sum": self.sum, "count": self.count}
        return {"bounds": list(self.bounds), **counts}


@dataclass(slots=True)
class CompletionTimes:
    """When the tokens of one completion arrived."""

    first: float | None = None
    last: float | None = None
    num_tokens: int = 0

    def add(self, number: int, now: float, gaps: dict[float, int]) -> None:
        """`number` tokens arrived; the gaps (ITL) that they end are counted in `gaps`."""
        if self.last is None:
            self.first = now
        else:
            gap = now - self.last
            gaps[gap] = gaps.get(gap, 0) + 1
        if number > 1:
            gaps[0.0] = gaps.get(0.0, 0) + number - 1
        self.last = now
        self.num_tokens += number

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two."""
        if self.first is None or self.last is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)


@dataclass(slots=True)
class _Histograms:
    ttft_seconds: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS))
    itl_seconds: Histogram = field(default_factory=lambda: Histogram(TOKEN_TIME_BOUNDS))
    tpot_seconds: Histogram = field(default_factory=lambda: Histogram(TOKEN_TIME_BOUNDS))
    e2e_seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_TIME_BOUNDS))
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_TIME_BOUNDS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_COUNT_BOUNDS))
    generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_COUNT_BOUNDS))


class EngineMetrics:
    """Totals of one engine. The output processor and the engine's step feed it."""

    def __init__(self) -> None:
        self.histograms = _Histograms()
        self.finished: Counter[FinishReason] = Counter()
        self.num_prompt_tokens = 0
        """Prompt tokens of finished requests, cached ones included."""
        self.num_prefill_tokens = 0
        """Scheduled in prefill; again after a preemption. Rates are differences of counters."""
        self.num_generation_tokens = 0
        self.num_steps = 0
        self._stats = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)

    def record_step(self, stats: SchedulerStats) -> None:
        self.num_steps += 1
        self.num_prefill_tokens += stats.num_prefill_tokens
        self._stats = stats

    def record_tokens(self, gaps: Mapping[float, int], number: int) -> None:
        """`number` tokens arrived in one step, of all completions.

        gaps: how often each came, see CompletionTimes; in a step of decodes most are equal.
        """
        self.num_generation_tokens += number
        for gap, times in gaps.items():
            self.histograms.itl_seconds.observe(gap, times)

    def record_ttft(self, seconds: float) -> None:
        self.histograms.ttft_seconds.observe(seconds)

    def record_completion(self, times: CompletionTimes, reason: FinishReason) -> None:
        self.finished[reason] += 1
        self.histograms.generation_tokens.observe(times.num_tokens)
        if (tpot := times.tpot) is not None:
            self.histograms.tpot_seconds.observe(tpot)

    def record_request(self, metrics: RequestMetrics, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens += num_prompt_tokens
        self.histograms.prompt_tokens.observe(num_prompt_tokens)
        if metrics.queue_time is not None:
            self.histograms.queue_seconds.observe(metrics.queue_time)
        if metrics.e2e is not None:
            self.histograms.e2e_seconds.observe(metrics.e2e)

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain data: gauges, counters, histograms."""
        stats = self._stats
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        free = stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 1.0
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_cache_usage": 1.0 - free,
            "num_steps": self.num_steps,
            "num_preemptions": stats.num_preemptions,
            "prompt_tokens": self.num_prompt_tokens,
            "prefill_tokens": self.num_prefill_tokens,
            "generation_tokens": self.num_generation_tokens,
            "completions": {reason.value: self.finished[reason] for reason in FinishReason},
            "prefix_cache_queries": queries,
            "prefix_cache_hits": hits,
            "prefix_cache_hit_rate": hits / queries if queries else 0.0,
            "histograms": {
                name: getattr(self.histograms, name).snapshot() for name in _Histograms.__slots__
            },
        }
