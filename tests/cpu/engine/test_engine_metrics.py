"""Definitions of the numbers, on timelines made by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.scheduler_output import SchedulerStats
from octavo.engine.metrics import CompletionTimes, EngineMetrics, Histogram
from octavo.outputs import FinishReason, RequestMetrics

STATS = SchedulerStats(2, 3, 100, 75, 40, 30, 1, 200, 50)


def timeline(times: list[tuple[float, int]]) -> tuple[EngineMetrics, CompletionTimes]:
    """One completion whose tokens arrive as (time, number)."""
    metrics, completion = EngineMetrics(), CompletionTimes()
    for now, number in times:
        gaps: dict[float, int] = {}
        completion.add(number, now, gaps)
        metrics.record_tokens(gaps, number)
    metrics.record_completion(completion, FinishReason.LENGTH)
    return metrics, completion


def test_tpot_divides_by_gaps_and_leaves_out_the_first_token():
    """B01: first at 1.0 s, 9 more every 0.1 s: 0.1, not 0.19 and not 0.09."""
    metrics, completion = timeline([(1.0 + 0.1 * i, 1) for i in range(10)])
    assert completion.tpot == pytest.approx(0.1)
    itl = metrics.histograms.itl_seconds
    assert (itl.count, itl.sum / itl.count) == (9, pytest.approx(0.1))
    assert metrics.histograms.tpot_seconds.count == 1


def test_tpot_is_undefined_below_two_tokens():
    """B01: one token or none is not 0 seconds a token."""
    for times in ([(1.0, 1)], []):
        metrics, completion = timeline(times)
        assert completion.tpot is None
        assert metrics.histograms.tpot_seconds.count == 0
        assert metrics.histograms.itl_seconds.count == 0


def test_tokens_that_arrive_together_have_no_gap_between_them():
    metrics, completion = timeline([(1.0, 2), (1.5, 3)])
    itl = metrics.histograms.itl_seconds
    assert (itl.count, itl.sum) == (4, 0.5)
    assert completion.tpot == 0.125


@given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(1, 4)), min_size=1, max_size=20))
def test_gaps_add_up_to_last_minus_first(steps):
    now, times = 0.0, []
    for gap, number in steps:
        now += gap
        times.append((now, number))
    metrics, completion = timeline(times)
    itl = metrics.histograms.itl_seconds
    assert itl.count == completion.num_tokens - 1
    assert itl.sum == pytest.approx(completion.last - completion.first)
    if completion.tpot is not None:
        assert itl.sum / itl.count == pytest.approx(completion.tpot)


def test_request_times():
    metrics = EngineMetrics()
    request = RequestMetrics(10.0, first_scheduled_time=10.5, finished_time=13.0)
    metrics.record_ttft(1.0)
    metrics.record_request(request, num_prompt_tokens=7)
    found = metrics.histograms
    assert found.queue_seconds.sum == 0.5
    assert found.ttft_seconds.sum == 1.0
    assert found.e2e_seconds.sum == 3.0
    assert found.prompt_tokens.sum == 7
    metrics.record_request(RequestMetrics(10.0), 1)  # aborted before it ran
    assert found.queue_seconds.count == found.e2e_seconds.count == 1


def test_histogram_bounds_are_inclusive():
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.snapshot()["count"] == 5
    assert Histogram((1.0,)).count == 0


def test_snapshot_is_plain_and_complete():
    metrics, _ = timeline([(1.0, 1), (2.0, 1)])
    assert metrics.snapshot()["prefix_cache_hit_rate"] == 0.0, "before the first step"
    metrics.record_step(STATS)
    found = json.loads(json.dumps(metrics.snapshot()))
    assert found["num_running"] == 2
    assert found["num_waiting"] == 3
    assert found["kv_cache_usage"] == 0.25
    assert found["prefix_cache_hit_rate"] == 0.25
    assert found["prefill_tokens"] == STATS.num_prefill_tokens
    assert found["generation_tokens"] == 2
    assert found["completions"] == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert set(found["histograms"]) == {
        "ttft_seconds",
        "itl_seconds",
        "tpot_seconds",
        "e2e_seconds",
        "queue_seconds",
        "prompt_tokens",
        "generation_tokens",
    }
    metrics.record_step(dataclasses.replace(STATS, num_blocks=0, num_free_blocks=0))
    assert metrics.snapshot()["kv_cache_usage"] == 0.0
