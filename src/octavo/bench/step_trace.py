"""From a GPU trace to times of operations: which kernel is what, how long it takes, what idles. Pure.

Triton kernels are known by name; a GEMM is known by the operations that it stands between, so that
any backend's kernel will do; the rest is listed under its own name. Operations are called as in
`config.step_cost`.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Event(NamedTuple):
    """Something that ran on the GPU."""

    name: str
    start_us: float
    duration_us: float
    stream: int


class Labelled(NamedTuple):
    """An event and the operation it belongs to; one that we do not know has the event's name."""

    operation: str
    known: bool
    event: Event


_WRITE, _PREPARE, _NORM = "_write_segments", "_prepare", "_rms_norm"
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_NAMED = {name: operation for operation, names in _TABLE["kernels"].items() for name in names}
_GEMM_AFTER: dict[str, str] = _TABLE["gemm_after"]
_GEMM_AFTER |= {name: name for name in set(_GEMM_AFTER.values())}
_GEMM = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|_fixed_linear|_grouped_linear", re.IGNORECASE
)
_GATHER = re.compile(r"index|gather", re.IGNORECASE)
_TRACE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def is_memory(event: Event) -> bool:
    """A copy or a fill, and no kernel."""
    return event.name.startswith(("Memcpy", "Memset"))


def read_chrome_trace(path: Path) -> list[Event]:
    """GPU events of a trace that torch.profiler exported, in order of their start."""
    events = [
        Event(row["name"], float(row["ts"]), float(row["dur"]), int(row["args"]["stream"]))
        for row in json.loads(path.read_text("utf-8"))["traceEvents"]
        if row.get("cat") in _TRACE_CATEGORIES
    ]
    return sorted(events, key=lambda event: event.start_us)


def split_steps(events: Sequence[Event]) -> tuple[list[Sequence[Event]], int]:
    """The steps of a trace (in order of start), and how many events come before the first one.

    Those are of a step that began earlier. A step starts where its inputs are prepared, or before
    that where request slots are written. The last step must be complete.
    """
    starts: list[int] = []
    written: int | None = None
    for index, event in enumerate(events):
        if event.name == _PREPARE:
            starts.append(index if written is None else written)
        if event.name == _WRITE:
            written = index if written is None else written
        elif event.name in _NAMED:
            written = None
    bounds = [*starts, len(events)]
    return [events[start:end] for start, end in itertools.pairwise(bounds)], bounds[0]


def label_step(events: Iterable[Event], num_layers: int) -> list[Labelled]:
    """Name the operation of each event of one step, in order of their start."""
    labelled = []
    before, num_norms = "", 0
    for event in events:
        if is_memory(event):
            labelled.append(Labelled(event.name.split(" (")[0], True, event))
            continue
        operation = _NAMED.get(event.name)
        if event.name == _NORM:
            last = num_norms == 2 * num_layers
            of_layer = ("input_norm", "post_attention_norm")[num_norms % 2]
            operation = "final_norm" if last else of_layer
            num_norms += 1
        elif operation is None and _GEMM.search(event.name):
            operation = _GEMM_AFTER.get(before)
        elif operation is None and before == "final_norm" and _GATHER.search(event.name):
            operation = "gather_rows"
        elif operation == "silu_and_mul" and before == "experts_gate_up_proj":
            operation = "experts_silu_and_mul"
        elif operation == "route" and labelled:  # the product before it was not of the MLP
            labelled[-1] = labelled[-1]._replace(operation="router")
        labelled.append(Labelled(operation or event.name, operation is not None, event))
        before = operation or before
    return labelled


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Where the time of a step goes."""

    steps: list[list[Labelled]]
    times: list[dict[str, Any]]
    """A row an operation: name; known; calls a step (kernels in a row are one call); median_us of a
    call; total_us of a step, the mean."""
    figures: dict[str, Any]
    """Medians over the steps in us: span_us, from a step's first event to its last; gap_us, idle time
    between them (median and total); idle_us, from the last one to the next step's first (median and
    p99; None for one step). And num_steps, and num_before: events outside of them."""


def profile_steps(events: Iterable[Event], num_layers: int, skip: int = 0) -> StepProfile:
    """Tables of a trace without its first `skip` whole steps. Raises ValueError if none is left."""
    ordered = sorted(events, key=lambda event: event.start_us)
    found, num_before = split_steps(ordered)
    steps = [label_step(step, num_layers) for step in found[skip:]]
    if not steps:
        raise ValueError(f"{len(found)} whole steps in {len(ordered)} GPU events")
    bounds, gaps = [], []
    for step in steps:
        starts = [event.start_us for _, _, event in step]
        ends = (event.start_us + event.duration_us for _, _, event in step)
        busy_until = list(itertools.accumulate(ends, max))
        bounds.append((starts[0], busy_until[-1]))
        pairs = zip(starts[1:], busy_until[:-1], strict=True)
        gaps.append([max(0.0, start - end) for start, end in pairs])
    idle = [max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(bounds)]
    figures = {
        "num_steps": len(steps),
        "num_before": num_before,
        "span_us": statistics.median(end - start for start, end in bounds),
        "gap_us": {
            "median": statistics.median(list(itertools.chain(*gaps)) or [0.0]),
            "total": statistics.median(map(sum, gaps)),
        },
        "idle_us": None,
    }
    if idle:
        p99 = float(np.percentile(idle, 99))
        figures["idle_us"] = {"median": statistics.median(idle), "p99": p99}
    return StepProfile(steps, _operation_times(steps), figures)


def _operation_times(steps: Sequence[Sequence[Labelled]]) -> list[dict[str, Any]]:
    calls: dict[tuple[str, bool], list[float]] = {}
    for step in steps:
        before = ""
        for operation, known, event in step:
            durations = calls.setdefault((operation, known), [])
            if known and operation == before:
                durations[-1] += event.duration_us
            else:
                durations.append(event.duration_us)
            if not is_memory(event):
                before = operation
    return [
        {
            "name": name,
            "known": known,
            "calls": len(durations) / len(steps),
            "median_us": statistics.median(durations),
            "total_us": sum(durations) / len(steps),
        }
        for (name, known), durations in calls.items()
    ]
