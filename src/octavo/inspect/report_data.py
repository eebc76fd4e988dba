"""Owns measurements as they are shown: the JSON of `bench.ladder.run_ladder` and `bench.device`, read.

A ladder run becomes checked, typed rows; a device measurement text, and rows for the report's tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from octavo.errors import KernelError
from octavo.files import read_text
from octavo.inspect.page import render, words
from octavo.kernels.matmul.registry import RUNGS, Rung
from octavo.kernels.matmul.roofline import DEVICES, Device, peak_flops, tile_intensity

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
        return next((r for r in RUNGS if r.name == self.rung), None)

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
    """A whole document. `device` is the GPU's data sheet, `ilp` as the harness wrote it, or empty."""

    environment: Mapping[str, Any]
    device: Device
    groups: tuple[Group, ...]
    ilp: tuple[Mapping[str, Any], ...]

    @property
    def wrong(self) -> list[str]:
        """Rungs that failed their check."""
        return sorted({r.rung for g in self.groups for r in g.rungs if not r.ok})


def load_run(path: Path) -> LadderRun:
    """Read and check a results file. Raises KernelError when it is not one, with the reason.

    Raises ConfigError, naming the option of `octavo kernels report`, when it cannot be read.
    """
    run: LadderRun = _load("json", path, "bench", parse_run)
    return run


def load_device(path: Path) -> dict[str, Any]:
    """Read a device measurement. Raises as `load_run` does."""
    return dict(_load("--device", path, "device", lambda found: device_text(found) and found))


def _load(option: str, path: Path, action: str, parse: Callable[[Any], Any]) -> Any:
    text = read_text(option, path)
    try:
        return parse(json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise KernelError(f"{path} is not JSON: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, UndefinedError) as error:
        what = f"the result of `octavo kernels {action}`"
        raise KernelError(f"{path} is not {what}: {error}") from error


def parse_run(document: Mapping[str, Any]) -> LadderRun:
    """Raises KeyError, TypeError or ValueError for a document of another form or with a NaN."""
    groups: dict[tuple[Any, ...], Group] = {}
    known = {"cublas", *(one.name for one in RUNGS)}
    for entry in document["results"]:
        size = int(entry["m"]), int(entry["n"]), int(entry["k"])
        dtype, mode, rung = (str(entry[key]) for key in ("dtype", "mode", "rung"))
        if dtype not in ("fp32", "bf16") or min(size) < 1 or rung not in known:
            raise ValueError(f"a result of {rung} for {dtype} of size {size}")
        group = groups.setdefault((dtype, size, mode), Group(dtype, size, mode))
        group.rows[rung] = Row(rung, bool(entry["ok"]), *(float(entry[key]) for key in _NUMBERS))
        group.clocks.update(entry.get("clocks") or {})
    if not groups:
        raise ValueError("it has no results")
    ilp = tuple(document.get("ilp", ()))
    environment = document.get("environment", {})
    return LadderRun(environment, device_of(environment), tuple(groups.values()), ilp)


def requested_intensity(rung: Rung) -> float:
    """FLOPs per byte that a rung asks of memory beyond its own SM's shared memory and registers.

    Before shared-memory tiles each thread asks for both operands of every multiply-add. With them,
    a CTA asks for one A and one B tile a K step; multicast makes the cluster's tile count.
    """
    width = 4 if rung.dtype == "fp32" else 2
    if rung.number <= 2:
        return tile_intensity(1, 1, element_bytes=width)
    return tile_intensity(rung.block_m * rung.cluster, rung.block_n, element_bytes=width)


def device_of(environment: Mapping[str, Any]) -> Device:
    """The data sheet for a document's GPU; H200 for one we do not know."""
    name = str(environment.get("gpu", "")).lower()
    if "h100" in name:
        return DEVICES["h100-pcie"] if "pcie" in name else DEVICES["h100"]
    return DEVICES["h200"]


def power_lines(document: Mapping[str, Any]) -> list[str]:
    """One sentence for random and one for zero inputs: speed, clock held, ceiling at that clock."""
    device = device_of(document["environment"])
    lines = []
    for label, row in document["tensor_core"].items():
        clock = row.get("sm_mhz_median")
        facts = {"tflops": float(row["tflops"]), "clock": clock, "watts": row.get("watts_max")}
        peak = peak_flops(device, "bf16", clock and float(clock)) / 1e12
        lines.append(words("power", inputs=label, **facts, peak=peak))
    spec = peak_flops(device, "bf16") / 1e12
    lines.append(f"the data sheet's {spec:.0f} TFLOP/s are those of {device.spec_clock} MHz")
    return lines


def device_text(document: Mapping[str, Any]) -> str:
    """The terminal view. Raises KeyError, TypeError or UndefinedError for another form."""
    return render("device.txt", found=document, power=power_lines(document))
