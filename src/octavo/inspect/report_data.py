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

_NUMBERS = ("median_us", "low_us", "high_us", "tflops", "vs_cublas")


@dataclass(frozen=True)
class Row:
    """One kernel in a group. Times in microseconds. Raises ValueError unless all are positive."""

    rung: str
    ok: bool
    median_us: float
    low_us: float
    high_us: float
    tflops: float
    vs_cublas: float

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if isinstance(value, float) and not 0 < value < math.inf:
                raise ValueError(f"{self.rung} has {key} = {value}")

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
    rows: dict[str, Row] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)

    @property
    def rungs(self) -> list[Row]:
        return [row for name, row in sorted(self.rows.items()) if name != "cublas"]

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
    return dict(_load(path, "device", device_text))


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
        what = f"the result of `octavo kernels {action}`"
        raise KernelError(f"{path} is not {what}: {error}") from error
    return document


def parse_run(document: Mapping[str, Any]) -> LadderRun:
    """Raises KeyError, TypeError or ValueError for a document of another form or with a NaN."""
    groups: dict[tuple[Any, ...], Group] = {}
    for entry in document["results"]:
        size = int(entry["m"]), int(entry["n"]), int(entry["k"])
        dtype, mode, rung = (str(entry[key]) for key in ("dtype", "mode", "rung"))
        group = groups.setdefault((dtype, size, mode), Group(dtype, size, mode))
        group.rows[rung] = Row(rung, bool(entry["ok"]), *(float(entry[key]) for key in _NUMBERS))
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
