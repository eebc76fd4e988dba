"""What a step must do beside what it took: rows for JSON, text tables, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.report import columns
from octavo.bench.step_trace import Labelled
from octavo.config.step_cost import Machine, Operation
from octavo.errors import ConfigError
from octavo.inspect.page import canvas, render, style

Row = dict[str, Any]

# Header, key of a row, factor, format.
_COLUMNS = (
    ("calls", "calls", 1.0, ".3g"),
    ("median us", "median_us", 1.0, ".2f"),
    ("total us", "total_us", 1.0, ".1f"),
    ("share", "share", 1.0, ".1%"),
    ("MB", "bytes", 1e-6, ".2f"),
    ("GFLOP", "flops", 1e-9, ".2f"),
    ("GB/s", "gb_per_s", 1.0, ".0f"),
    ("TFLOP/s", "tflop_per_s", 1.0, ".1f"),
    ("ceiling us", "ceiling_us", 1.0, ".1f"),
    ("with ramps", "expected_us", 1.0, ".1f"),
    ("of ceiling", "of_ceiling", 1.0, ".2f"),
)
_SUMMED = ("total_us", "share", "bytes", "flops", "ceiling_us", "expected_us")
_NAME_WIDTH = 44


def operation_rows(
    costs: Sequence[Operation], machine: Machine, times: Sequence[Row] = ()
) -> list[Row]:
    """One row an operation in order of the step, then what was measured and costs nothing we count.

    times: as in `StepProfile`. calls, bytes, flops and all times but median_us are those of a step.
    Keys that an operation has no figure for are missing.
    """
    whole = sum(time["total_us"] for time in times) or 1.0
    took = {time["name"]: {**time, "share": time["total_us"] / whole} for time in times}
    rows: list[Row] = []
    for cost in costs:
        row: Row = {"name": cost.name, "calls": cost.count}
        row |= {"bytes": cost.bytes, "flops": cost.flops}
        row["ceiling_us"] = cost.ceiling_s(machine) * 1e6
        row["expected_us"] = cost.expected_s(machine) * 1e6
        row |= took.pop(cost.name, {})
        if total_us := row.get("total_us"):
            row["gb_per_s"] = cost.bytes / total_us / 1e3
            row["tflop_per_s"] = cost.flops / total_us / 1e6
            row["of_ceiling"] = row["ceiling_us"] / total_us
        rows.append(row)
    return rows + sorted(took.values(), key=lambda row: -row["total_us"])


def table(rows: Sequence[Row]) -> str:
    """Aligned text with totals, without columns that no row has; `?` marks unknown kernels."""
    total: Row = {"name": "total"}
    total |= {key: sum(row.get(key, 0) for row in rows) for key in _SUMMED}
    if total["total_us"]:
        total["of_ceiling"] = total["ceiling_us"] / total["total_us"]
    shown = [column for column in _COLUMNS if any(column[1] in row for row in rows)]
    lines = [["operation", *(column[0] for column in shown)]]
    for row in [*rows, total]:
        name = short_name(row["name"])
        cells = [name if row.get("known", True) else f"? {name}"]
        for _, key, factor, form in shown:
            cells.append(format(row[key] * factor, form) if key in row else "")
        lines.append(cells)
    return columns(lines, right=True)


def short_name(name: str) -> str:
    """A kernel's name without what all of torch's begin with, cut to a width."""
    for common in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(common, "")
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"


def machine_text(machine: Machine) -> str:
    """The figures that ceilings are made of, and their source."""
    return (
        f"ceilings of an {machine.name}: {machine.bytes_per_s / 1e12:.2f} TB/s, "
        f"{machine.flops_per_s / 1e12:.0f} TFLOP/s, ramp {machine.ramp_s * 1e6:g} us a call\n"
        f"({machine.source})"
    )


def summary(result: Mapping[str, Any]) -> str:
    """What `bench.step.run_step` found, but for the table."""
    return render("step.txt", **result).rstrip("\n")


@style()
def draw_step(path: Path, step: Sequence[Labelled], rows: Sequence[Row], title: str) -> None:
    """A step as a timeline, a row a stream, over bars of measured and least time by operation.

    The file's suffix decides its format. Raises ConfigError if it cannot be written, and
    KernelError without matplotlib.
    """
    from matplotlib import colormaps

    rows = [row for row in rows if "total_us" in row]
    palette = colormaps["tab20"]
    colours = {row["name"]: palette(index % 20) for index, row in enumerate(rows)}
    heights = [1, max(1.0, 0.15 * len(rows))]
    figure, axes = canvas(1000, 290 + 22 * len(rows), "T;B", title, height_ratios=heights)
    timeline, bars = axes.values()
    start_us = step[0].event.start_us
    streams = sorted({event.stream for _, _, event in step})
    for operation, _, event in step:
        place, colour = streams.index(event.stream), colours[operation]
        timeline.barh(place, event.duration_us, 0.8, event.start_us - start_us, color=colour)
    timeline.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    timeline.set(xlabel="us", title=title)
    places = range(len(rows))
    bars.barh(places, [row["total_us"] for row in rows], color=list(colours.values()))
    least = [row.get("ceiling_us", 0.0) for row in rows]
    bars.barh(places, least, height=0.35, color="black", label="ceiling")
    bars.set_yticks(places, [short_name(row["name"]) for row in rows])
    bars.invert_yaxis()
    bars.set(xlabel="us a step, all calls")
    bars.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture: cannot write {path}: {error}") from None
