"""Owns the reading of a ladder run: the JSON of `bench.ladder.run_ladder` as checked, typed rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import KernelError
from octavo.inspect.device_view import device_of, device_text
from octavo.kernels.matmul.registry import RUNGS, Rung
from octavo.kernels.matmul.roofline import Device, tile_intensity

CUBLAS = "cublas"


@dataclass(frozen=True)
class Row:
    """One kernel at one size in one mode. Times in microseconds."""

    rung: str
    dtype: str
    m: int
    n: int
    k: int
    mode: str
    median_us: float
    low_us: float
    high_us: float
    tflops: float
    vs_cublas: float
    ok: bool

    def spread_tflops(self) -> tuple[float, float]:
        flops = 2.0 * self.m * self.n * self.k
        return flops / self.high_us / 1e6, flops / self.low_us / 1e6


@dataclass(frozen=True)
class Group:
    """What was timed together: one dtype, size and mode, cuBLAS included. `clocks` may be empty."""

    dtype: str
    size: tuple[int, int, int]
    mode: str
    rows: tuple[Row, ...]
    clocks: Mapping[str, Any]

    @property
    def cublas(self) -> Row | None:
        return next((r for r in self.rows if r.rung == CUBLAS), None)

    @property
    def rungs(self) -> list[Row]:
        return sorted((r for r in self.rows if r.rung != CUBLAS), key=lambda r: r.rung)

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
        return device_of(str(self.environment.get("gpu", "")))


def load_run(path: Path) -> LadderRun:
    """Read and check a results file. Raises KernelError when it is not one, with the reason."""
    document = _read(path)
    try:
        return parse_run(document)
    except (KeyError, TypeError, ValueError) as error:
        raise KernelError(f"{path} is not the result of `octavo kernels bench`: {error}") from error


def load_device(path: Path) -> Mapping[str, Any]:
    """Read a device measurement. Raises KernelError when it is not one."""
    document: Mapping[str, Any] = _read(path)
    try:
        device_text(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KernelError(
            f"{path} is not the result of `octavo kernels device`: {error}"
        ) from error
    return document


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise KernelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # bad UTF-8 or bad JSON
        raise KernelError(f"{path} is not JSON: {error}") from error


def parse_run(document: Mapping[str, Any]) -> LadderRun:
    """Raises KeyError, TypeError or ValueError for a document of another form or with a NaN."""
    groups: dict[tuple[str, tuple[int, int, int], str], list[Row]] = {}
    clocks: dict[tuple[str, tuple[int, int, int], str], Mapping[str, Any]] = {}
    for entry in document["results"]:
        row = _row(entry)
        key = row.dtype, (row.m, row.n, row.k), row.mode
        groups.setdefault(key, []).append(row)
        if entry.get("clocks"):
            clocks[key] = entry["clocks"]
    if not groups:
        raise ValueError("it has no results")
    made = tuple(Group(*key, tuple(rows), clocks.get(key, {})) for key, rows in groups.items())
    return LadderRun(document.get("environment", {}), made, tuple(document.get("ilp", ())))


def _row(entry: Mapping[str, Any]) -> Row:
    def positive(key: str) -> float:
        value = float(entry[key])
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{entry['rung']} has {key} = {value}")
        return value

    return Row(
        rung=str(entry["rung"]),
        dtype=str(entry["dtype"]),
        m=int(entry["m"]),
        n=int(entry["n"]),
        k=int(entry["k"]),
        mode=str(entry["mode"]),
        median_us=positive("median_us"),
        low_us=positive("low_us"),
        high_us=positive("high_us"),
        tflops=positive("tflops"),
        vs_cublas=positive("vs_cublas"),
        ok=bool(entry["ok"]),
    )


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
