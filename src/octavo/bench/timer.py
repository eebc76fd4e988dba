"""Times GPU work so that the numbers can be compared: graph replay, cold L2, arms in turn.

Every arm of a comparison runs in every round, in shuffled order, so drift of clock or temperature
meets all of them. An arm is a list of calls over different operand sets: when the sets together are
larger than twice the L2, each launch finds its operands in memory, not in the cache.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
COLD_BYTES = 2 * 60 * 2**20  # operand sets beyond this leave nothing useful in a 60 MB L2


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch, over the rounds of one comparison."""

    median_us: float
    low_us: float
    high_us: float
    rounds: int


def rotation_count(set_bytes: int) -> int:
    """How many operand sets of `set_bytes` make every launch find a cold L2; at least 2."""
    return max(2, -(-COLD_BYTES // max(set_bytes, 1)) + 1)


def capture(calls: Sequence[Call], launches: int) -> torch.cuda.CUDAGraph:
    """One graph of `launches` launches that walks over `calls` in turn; runs each call once first."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            calls[index % len(calls)]()
    return graph


def compare(
    arms: Mapping[str, Sequence[Call]],
    *,
    launches: int,
    rounds: int = 7,
    pause: float = 0.0,
    settle: bool = False,
) -> dict[str, Timing]:
    """Times all arms, interleaved. `pause` seconds of idling before each sample let the chip cool.

    A sample is one replay of `launches` launches between two events, right after an untimed replay:
    of one launch, which wakes the clock, or with `settle` of the whole sample, so that the clock is
    the one that this arm holds and not what the arm before left. Each round has its own order.
    """
    graphs = {name: capture(calls, launches) for name, calls in arms.items()}
    wakers = {name: capture(calls[-1:], 1) for name, calls in arms.items()}
    samples: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    shuffle = random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(names)
        for name in names:
            torch.cuda.synchronize()
            if pause:
                time.sleep(pause)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            (graphs if settle else wakers)[name].replay()
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1000 / launches)
    return {
        name: Timing(statistics.median(values), min(values), max(values), len(values))
        for name, values in samples.items()
    }


def hold_load(call: Call, seconds: float) -> None:
    """Keeps the GPU busy until it has reached the clock that it can hold."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
