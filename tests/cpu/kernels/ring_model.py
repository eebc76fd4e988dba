"""A model of mbarriers and of a ring of stages, run in any order, to try the phase arithmetic on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.kernels.matmul import barriers


class Mbarrier:
    """One shared-memory barrier: a phase ends when `expected` arrivals and all its bytes are in."""

    def __init__(self, expected: int) -> None:
        if expected < 1:
            raise ValueError("a barrier expects at least one arrival")
        self.expected = expected
        self.phase = 0
        self._missing = expected
        self._bytes = 0

    def arrive(self, expect_bytes: int = 0) -> None:
        """One arrival; with bytes, arrive.expect_tx. Raises RuntimeError past the count."""
        if self._missing == 0:
            raise RuntimeError("more arrivals than the barrier expects in one phase")
        self._missing -= 1
        self._bytes += expect_bytes
        self._finish()

    def complete_bytes(self, count: int) -> None:
        """What TMA does as data lands. It may come before the matching arrive."""
        self._bytes -= count
        self._finish()

    def passes(self, parity: int) -> bool:
        """mbarrier.test_wait.parity: has the phase of this parity ended?"""
        return self.phase != parity

    def _finish(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self.phase ^= 1
            self._missing = self.expected


@dataclass(frozen=True)
class RingEvent:
    """One step of a simulated run; `actor` is "tma", "producer" or "consumer 0", "consumer 1"..."""

    actor: str
    action: str
    iteration: int
    stage: int


def simulate_ring(
    num_stages: int, iterations: int, num_consumers: int, choose: Callable[[int], int]
) -> list[RingEvent]:
    """Run one producer, its TMA unit and some consumers in any order and check the data they see.

    `choose(n)` picks who moves next among the n actors that can. Raises RuntimeError on a deadlock,
    on a stage overwritten before all consumers have read it, and on a consumer that reads the
    wrong iteration's data.
    """
    ring = _Ring(num_stages, iterations, num_consumers)
    while ring.busy():
        ready = ring.ready()
        if not ready:
            raise RuntimeError("deadlock: every actor waits")
        ring.step(ready[choose(len(ready)) % len(ready)])
    return ring.events


class _Ring:
    """The state of one simulated run. Actor -2 is the TMA unit, -1 the producer, 0.. consumers."""

    def __init__(self, num_stages: int, iterations: int, num_consumers: int) -> None:
        self.num_stages, self.iterations = num_stages, iterations
        self.full = [Mbarrier(1) for _ in range(num_stages)]
        self.empty = [Mbarrier(num_consumers) for _ in range(num_stages)]
        self.data: list[int | None] = [None] * num_stages
        self.readers = [num_consumers] * num_stages
        self.consumed = [0] * num_consumers
        self.produced = 0
        self.in_flight: list[int] = []
        self.events: list[RingEvent] = []

    def busy(self) -> bool:
        return any(done < self.iterations for done in self.consumed)

    def ready(self) -> list[int]:
        actors = [-2] if self.in_flight else []
        if self.produced < self.iterations:
            at = barriers.slot(self.produced, self.num_stages)
            if self.empty[at.stage].passes(at.empty_parity):
                actors.append(-1)
        for consumer, done in enumerate(self.consumed):
            if done < self.iterations:
                at = barriers.slot(done, self.num_stages)
                if self.full[at.stage].passes(at.full_parity):
                    actors.append(consumer)
        return actors

    def step(self, actor: int) -> None:
        if actor == -1:
            at = barriers.slot(self.produced, self.num_stages)
            if self.produced >= self.num_stages and self.readers[at.stage] < len(self.consumed):
                raise RuntimeError(f"stage {at.stage} overwritten while in use")
            self.full[at.stage].arrive(expect_bytes=1)
            self.in_flight.append(self.produced)
            self._log("producer", "issue", self.produced)
            self.produced += 1
        elif actor == -2:
            iteration = self.in_flight.pop(0)
            stage = iteration % self.num_stages
            self.data[stage], self.readers[stage] = iteration, 0
            self.full[stage].complete_bytes(1)
            self._log("tma", "land", iteration)
        else:
            iteration = self.consumed[actor]
            stage = iteration % self.num_stages
            if self.data[stage] != iteration:
                raise RuntimeError(f"consumer {actor} wanted {iteration}, saw {self.data[stage]}")
            self.readers[stage] += 1
            self.empty[stage].arrive()
            self.consumed[actor] += 1
            self._log(f"consumer {actor}", "release", iteration)

    def _log(self, actor: str, action: str, iteration: int) -> None:
        self.events.append(RingEvent(actor, action, iteration, iteration % self.num_stages))
