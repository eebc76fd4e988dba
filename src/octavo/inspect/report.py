"""Owns the ladder report: one self-contained HTML page made from the JSON of a ladder run.

The words are in report.html; here is what they are filled with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.inspect import figures, report_data
from octavo.inspect.asm import Assembly, Note
from octavo.inspect.page import SERIES, render
from octavo.inspect.report_data import Group, LadderRun, requested_intensity
from octavo.kernels.matmul.occupancy import occupancy
from octavo.kernels.matmul.registry import rung
from octavo.kernels.matmul.roofline import Roofline, peak_flops

_COLOURS = {"bf16": SERIES[2], "fp32": SERIES[0]}


def render_report(
    run: LadderRun,
    *,
    device: Mapping[str, Any] | None = None,
    assemblies: Mapping[str, tuple[Assembly, Sequence[Note]]] | None = None,
    asm_links: Mapping[str, str] | None = None,
) -> str:
    """The page. `device` is a checked device measurement, `assemblies` adds registers and remarks
    for each rung by name, `asm_links` the hrefs of their asm pages.
    """
    by_dtype = {d: [g for g in run.groups if g.dtype == d] for d in _COLOURS}
    present = {dtype: groups for dtype, groups in by_dtype.items() if groups}
    # Each rung once in the table: at the largest size of its dtype, first mode.
    shown = [
        max(groups, key=lambda g: g.size[0] * (g.mode == groups[0].mode))
        for _, groups in sorted(present.items(), reverse=True)
    ]
    gpu = run.environment.get("gpu", "an unnamed GPU")
    return render(
        "report.html",
        title=f"The matmul ladder on {gpu}",
        gpu=gpu,
        run=run,
        found=device,
        power=report_data.power_lines(device) if device else None,
        access=figures.access_figure(device) if device else None,
        ladders={d: [_chart(run, group) for group in groups] for d, groups in present.items()},
        shown=shown,
        links=asm_links or {},
        roofline=_roofline(run, [groups[0] for groups in present.values()], device),
        pictures=figures.pictures(),
        code=list(_code(assemblies or {})),
    )


def _chart(run: LadderRun, group: Group) -> tuple[Group, Any, float | None]:
    """A group, its bars beside what they are held against, and the highest board power."""
    cublas = group.rows.get("cublas")
    marks = {"cuBLAS": cublas.tflops} if cublas else {}
    steady = group.mode != "cool"  # bursts are too short for NVML's samples to tell their clock
    clock = group.clocks.get("sm_mhz_median") if steady else run.device.max_clock
    if clock:
        name = f"all units busy, {clock:.0f} MHz {'held' if steady else 'at most'}"
        marks[name] = peak_flops(run.device, group.dtype, float(clock)) / 1e12
    marks[f"data sheet, {run.device.spec_clock} MHz"] = peak_flops(run.device, group.dtype) / 1e12
    picture = figures.ladder_figure(group, marks, _COLOURS[group.dtype])
    return group, picture, group.clocks.get("watts_max") if steady else None


def _roofline(run: LadderRun, groups: Sequence[Group], measured: Mapping[str, Any] | None) -> Any:
    roofs = figures.device_roofs(run.device)
    if measured:
        rate = float(measured["bandwidth_gbs"]["l2_read"]) * 1e9
        slope = f"L2 by ordinary loads, {rate / 1e12:.1f} TB/s"
        roofs.append(("", slope, Roofline(peak_flops(run.device, "bf16"), rate), SERIES[3]))
    points = [
        (requested_intensity(one), row.tflops, f"{one.number:02d}", _COLOURS[group.dtype])
        for group in groups
        for row in group.rungs
        if (one := row.known) and row.ok
    ]
    return figures.roofline_figure(roofs, points, "Roofline with every rung")


def _code(built: Mapping[str, tuple[Assembly, Sequence[Note]]]) -> Iterator[tuple[Any, ...]]:
    """For each rung its resources, bytes of shared memory, occupancy, SASS length, and remarks."""
    for name, (assembly, remarks) in built.items():
        one, found = rung(name), assembly.resources
        smem = found.static_smem + one.dynamic_smem
        fit = occupancy(one.threads, found.registers, smem)
        yield one, found, smem, fit, len(assembly.sass.instructions), remarks
