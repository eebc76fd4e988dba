"""The ring's phases: hand-worked rounds, every interleaving safe, and what the model must catch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cpu.kernels.ring_model import Mbarrier, simulate_ring

from octavo.kernels.matmul import barriers
from octavo.kernels.matmul.barriers import Slot, ring_timeline, slot


def test_two_rounds_of_a_three_stage_ring_by_hand() -> None:
    rounds = [slot(i, 3) for i in range(7)]
    assert [s.stage for s in rounds] == [0, 1, 2, 0, 1, 2, 0]
    assert [s.full_parity for s in rounds] == [0, 0, 0, 1, 1, 1, 0]
    assert [s.empty_parity for s in rounds] == [1, 1, 1, 0, 0, 0, 1]


@given(st.integers(1, 8), st.integers(0, 40), st.integers(1, 4), st.integers(0, 2**32))
def test_no_interleaving_deadlocks_or_overtakes(
    stages: int, iterations: int, consumers: int, seed: int
) -> None:
    events = simulate_ring(stages, iterations, consumers, random.Random(seed).randrange)
    for consumer in range(consumers):
        seen = [e.iteration for e in events if e.actor == f"consumer {consumer}"]
        assert seen == list(range(iterations))
    issued = landed = 0
    for event in events:
        issued += event.actor == "producer"
        landed += event.actor == "tma"
        assert landed <= issued


def test_the_model_catches_a_producer_that_does_not_flip_its_parity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(iteration: int, stages: int) -> Slot:
        right = slot(iteration, stages)
        return Slot(right.stage, right.full_parity, 1)

    monkeypatch.setattr(barriers, "slot", wrong)
    # Parity 1 passes while phase 0 runs, that is: before anyone has released the stage.
    with pytest.raises(RuntimeError, match="overwritten"):
        simulate_ring(2, 6, 1, lambda n: 0)


def test_the_model_catches_a_ring_that_starts_with_the_wrong_parity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(iteration: int, stages: int) -> Slot:
        right = slot(iteration, stages)
        return Slot(right.stage, right.full_parity, right.full_parity)

    monkeypatch.setattr(barriers, "slot", wrong)
    with pytest.raises(RuntimeError, match="deadlock"):
        simulate_ring(2, 6, 1, lambda n: 0)


def test_a_barrier_flips_only_when_arrivals_and_bytes_are_complete() -> None:
    barrier = Mbarrier(2)
    barrier.complete_bytes(64)  # the data may land before the expectation is posted
    barrier.arrive(expect_bytes=64)
    assert barrier.phase == 0
    assert not barrier.passes(0)
    assert barrier.passes(1)
    barrier.arrive()
    assert barrier.phase == 1
    assert barrier.passes(0)
    with pytest.raises(ValueError, match="at least one"):
        Mbarrier(0)


def test_arrivals_past_the_count_are_a_bug() -> None:
    barrier = Mbarrier(1)
    barrier.arrive(expect_bytes=16)  # the phase stays open until the bytes come
    with pytest.raises(RuntimeError, match="more arrivals"):
        barrier.arrive()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="ring"):
        slot(0, 0)
    with pytest.raises(ValueError, match="-1"):
        slot(-1, 2)


@given(st.integers(1, 8), st.integers(1, 60), st.integers(0, 12), st.integers(1, 9))
def test_the_timeline_keeps_the_rules_of_the_ring(
    stages: int, iterations: int, load: int, math: int
) -> None:
    spans = ring_timeline(stages, iterations, load_ticks=load, math_ticks=math)
    for span in spans:
        assert span.at == slot(span.iteration, stages)
        assert span.land == span.issue + load <= span.start
        assert span.end == span.start + math
        if span.iteration >= stages:
            assert span.issue >= spans[span.iteration - stages].end
        if span.iteration:
            assert span.start >= spans[span.iteration - 1].end


@pytest.mark.parametrize(("stages", "busy"), [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.0)])
def test_stages_hide_latency_by_hand(stages: int, busy: float) -> None:
    # Loads of 6 ticks, math of 2: four stages cover 8 ticks.
    spans = ring_timeline(stages, 400, load_ticks=6, math_ticks=2)
    assert 400 * 2 / spans[-1].end == pytest.approx(busy, rel=0.02)
    with pytest.raises(ValueError, match="math"):
        ring_timeline(1, 1, load_ticks=1, math_ticks=0)
