"""Owns the phase arithmetic of a producer/consumer ring, and its best schedule.

Each stage of the ring has two barriers: `full` (the producer's bytes have landed) and `empty` (all
consumers are done with them). A barrier has no counter of rounds that a thread could read, only a
phase bit; both sides derive the parity to wait for from their own iteration number. The kernels
compute exactly `slot`; a model of the barriers in the tests shows that no interleaving overtakes.
PTX ISA, "mbarrier".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Where iteration i of either side works and which parities it waits for."""

    stage: int
    full_parity: int  # the consumer's wait
    empty_parity: int  # the producer's wait; 1 in the first round, which passes at once


def slot(iteration: int, num_stages: int) -> Slot:
    """Stage and parities of one iteration; iterations count on across tiles of a persistent CTA."""
    if iteration < 0 or num_stages < 1:
        raise ValueError(f"no iteration {iteration} in a ring of {num_stages} stages")
    round_bit = iteration // num_stages % 2
    return Slot(iteration % num_stages, round_bit, round_bit ^ 1)


@dataclass(frozen=True)
class RingSpan:
    """When one iteration of a ring did what, in ticks: issue -> land -> start -> end of its math."""

    iteration: int
    at: Slot
    issue: int
    land: int
    start: int
    end: int


def ring_timeline(
    num_stages: int, iterations: int, *, load_ticks: int, math_ticks: int
) -> list[RingSpan]:
    """The best schedule of a ring whose loads take `load_ticks` and whose math takes `math_ticks`.

    Any number of loads may be in flight; a stage is refilled when its math has ended. With S stages
    the math unit is busy min(1, S * math / (load + math)) of the time, start-up aside.
    """
    if num_stages < 1 or load_ticks < 0 or math_ticks < 1:
        raise ValueError("a ring needs a stage, and math that takes time")
    spans: list[RingSpan] = []
    for iteration in range(iterations):
        freed = spans[iteration - num_stages].end if iteration >= num_stages else 0
        land = freed + load_ticks
        start = max(land, spans[-1].end if spans else 0)
        at = slot(iteration, num_stages)
        spans.append(RingSpan(iteration, at, freed, land, start, start + math_ticks))
    return spans
