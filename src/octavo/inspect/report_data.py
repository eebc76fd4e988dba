"""Owns the reading of a ladder run: the JSON of `bench.ladder.run_ladder` as checked, typed rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import KernelError
from octavo.inspect.device_view import device_of, device_text
from octavo.kernels.matmul.registry import RUNGS, Rung
from octavo.kernels.matmul.roofline import Device, tile_intensity

_POSITIVE = ("median_us", "low_us", "high_us", "tflops", "vs_cublas")


@dataclass(frozen=True)
class Row:
    """One kernel in a group. Times in microseconds."""

    rung: str
    ok: bool
    median_us: float
    low_us: float
    high_us: float
    tflops: float
    vs_cublas: float

    @property
    def known(self) -> Rung | None:
        return known_rung(self.rung)

    @property
    def spread_tflops(self) -> tuple[float, float]:
        """The speeds of the slowest and of the fastest sample."""
        work = self.tflops * self.median_us
        return work / self.high_us, work / self.low_us


@dataclass(frozen=True)
class Group:
    """What was timed together: one dtype, size and mode, cuBLAS included. `clocks` may be empty."""

    dtype: str
    size: tuple[int, int, int]
    mode: str
    rows: list[Row] = field(default_factory=list)
    clocks: dict[str, Any] = field(default_factory=dict)

    @property
    def cublas(self) -> Row | None:
        return next((r for r in self.rows if r.rung == "cublas"), None)

    @property
    def rungs(self) -> list[Row]:
        return sorted((r for r in self.rows if r.rung != "cublas"), key=lambda r: r.rung)

    @property
    def best(self) -> Row | None:
        """The fastest rung that is right."""
        return max((r for r in self.rungs if r.ok), key=lambda r: r.tflops, default=None)

    @property
    def name(self) -> str:
        m, n, k = self.size
        shape = f"{m}³" if m == n == k else f"{m} x {n} x {k}"
        return f"{self.dtype} at {shape}, {self.mode}"


@dataclass(frozen=True)
class LadderRun:
    """A whole document. `ilp` as written by the harness, or empty."""

    environment: Mapping[str, Any]
    groups: tuple[Group, ...]
    ilp: tuple[Mapping[str, Any], ...]

    @property
    def device(self) -> Device:
        """The data sheet of the GPU that was measured; H200 for one we do not know."""
        return device_of(self.environment)

    @property
    def wrong(self) -> list[str]:
        """Rungs that failed their check."""
        return sorted({r.rung for g in self.groups for r in g.rungs if not r.ok})


def load_run(path: Path) -> LadderRun:
    """Read and check a results file. Raises KernelError when it is not one, with the reason."""
    return parse_run(_load(path, "bench", parse_run))


def load_device(path: Path) -> Mapping[str, Any]:
    """Read a device measurement. Raises KernelError when it is not one."""
    document: Mapping[str, Any] = _load(path, "device", device_text)
    return document


def _load(path: Path, action: str, check: Callable[[Any], object]) -> Any:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise KernelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # bad UTF-8 or bad JSON
        raise KernelError(f"{path} is not JSON: {error}") from error
    try:
        check(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KernelError(
            f"{path} is not the result of `octavo kernels {action}`: {error}"
        ) from error
    return document


def parse_run(document: Mapping[str, Any]) -> LadderRun:
    """Raises KeyError, TypeError or ValueError for a document of another form or with a NaN."""
    groups: dict[tuple[Any, ...], Group] = {}
    for entry in document["results"]:
        size = int(entry["m"]), int(entry["n"]), int(entry["k"])
        dtype, mode = str(entry["dtype"]), str(entry["mode"])
        group = groups.setdefault((dtype, size, mode), Group(dtype, size, mode))
        numbers = {key: float(entry[key]) for key in _POSITIVE}
        for key, value in numbers.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{entry['rung']} has {key} = {value}")
        group.rows.append(Row(str(entry["rung"]), bool(entry["ok"]), **numbers))
        group.clocks.update(entry.get("clocks") or {})
    if not groups:
        raise ValueError("it has no results")
    ilp = tuple(document.get("ilp", ()))
    return LadderRun(document.get("environment", {}), tuple(groups.values()), ilp)


def known_rung(name: str) -> Rung | None:
    return next((r for r in RUNGS if r.name == name), None)


def requested_intensity(rung: Rung) -> float:
    """FLOPs per byte that a rung asks of memory beyond its own SM's shared memory and registers.

    Before shared-memory tiles each thread asks for both operands of every multiply-add. With them,
    a CTA asks for one A and one B tile a K step; multicast makes the cluster's tile count.
    """
    width = 4 if rung.dtype == "fp32" else 2
    if rung.number <= 2:
        return tile_intensity(1, 1, element_bytes=width)
    rows = rung.block_m * max(1, rung.cluster // rung.cluster_n)
    return tile_intensity(rows, rung.block_n * rung.cluster_n, element_bytes=width)
