"""Owns the curves: quantization, occupancy, roofline, and the bar chart of a ladder run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.inspect.svg import (
    ACCENT,
    INK,
    SERIES,
    SOFT,
    Axis,
    Scale,
    Svg,
    draw_axes,
    percent_ticks,
)
from octavo.kernels.matmul.occupancy import HOPPER, occupancy
from octavo.kernels.matmul.quantization import (
    gemm_efficiency,
    tile_quantization,
    wave_quantization,
)
from octavo.kernels.matmul.roofline import H200, Roofline


def _frame(svg: Svg, left: float, name: str, x: Axis, y: Axis) -> None:
    svg.text(left - 40, 24, name, size=15, bold=True)
    draw_axes(svg, x, y)


def quantization_figure() -> Svg:
    """Useful work against size: edge tiles, the last wave, and both together."""
    svg = Svg(1000, 660, "Tile and wave quantization")
    size = Scale(1, 512, 60, 480)
    part = Scale(0, 1, 270, 70)
    ticks = [(n, str(n)) for n in (32, 128, 256, 384, 512)]
    axis_y = Axis(part, percent_ticks(), "useful part of the work")
    _frame(svg, 60, "Edge tiles", Axis(size, ticks, "M = N"), axis_y)
    for index, block in enumerate((32, 64, 128)):
        curve = [(n, tile_quantization(n, n, block, block).efficiency) for n in range(1, 513)]
        svg.line([(size(n), part(e)) for n, e in curve], SERIES[index], width=1.5)
        _key(svg, 380, 180 + 18 * index, SERIES[index], f"{block}x{block} tiles")
    spot = tile_quantization(33, 33, 32, 32).efficiency
    svg.circle(size(33), part(spot), 4, SERIES[0], tip="33 x 33 with 32-tiles")
    svg.text(size(33) + 9, part(spot) + 14, f"33x33, 32-tiles: {spot:.0%}", size=12, fill=SOFT)

    tiles = Scale(1, 528, 570, 970)
    _frame(
        svg,
        570,
        "The last wave",
        Axis(tiles, [(n, str(n)) for n in (132, 264, 396, 528)], "tiles on 132 SMs"),
        Axis(part, percent_ticks(), "busy part of the time"),
    )
    waves = [(n, wave_quantization(n, 132).efficiency) for n in range(1, 529)]
    svg.line([(tiles(n), part(e)) for n, e in waves], SERIES[0], width=1.5)
    low = wave_quantization(133, 132).efficiency
    svg.circle(tiles(133), part(low), 4, SERIES[0], tip="133 tiles take two waves")
    svg.text(tiles(133) + 9, part(low) + 14, f"133 tiles, 2 waves: {low:.0%}", size=12, fill=SOFT)
    _both_panel(svg)
    return svg


def _both_panel(svg: Svg) -> None:
    """Square problems with the tiles of the ladder, as users meet them."""
    size = Scale(512, 8192, 60, 970)
    part = Scale(0, 1, 590, 400)
    ticks = [(n, str(n)) for n in range(1024, 8193, 1024)]
    svg.text(20, 360, "Both, for square problems", size=15, bold=True)
    axis_y = Axis(part, percent_ticks(), "most of full speed that is left")
    draw_axes(svg, Axis(size, ticks, "M = N, 132 SMs, one CTA each"), axis_y)
    for index, (bm, bn) in enumerate(((128, 128), (128, 256), (192, 256))):
        curve = [
            (n, gemm_efficiency(n, n, bm, bn, slots=H200.num_sms)) for n in range(512, 8193, 64)
        ]
        svg.line([(size(n), part(e)) for n, e in curve], SERIES[index], width=1.5)
        _key(svg, 700 + 100 * index, 360, SERIES[index], f"{bm}x{bn}")


def _key(svg: Svg, x: float, y: float, colour: str, words: str) -> None:
    svg.line([(x, y - 4), (x + 18, y - 4)], colour, width=3)
    svg.text(x + 24, y, words, size=12)


def occupancy_figure() -> Svg:
    """Resident warps against registers, and CTAs against shared memory, on one Hopper SM."""
    svg = Svg(1000, 330, "Occupancy of a Hopper SM")
    registers = Scale(16, 255, 60, 480)
    warps = Scale(0, 64, 270, 70)
    ticks = [(n, str(n)) for n in (32, 64, 96, 128, 168, 255)]
    levels = [(n, str(n)) for n in (0, 16, 32, 48, 64)]
    axis_y = Axis(warps, levels, "resident warps (of 64)")
    _frame(svg, 60, "Registers", Axis(registers, ticks, "registers a thread"), axis_y)
    for index, threads in enumerate((128, 384, 1024)):
        curve: list[tuple[float, float]] = []
        for count in range(16, 256):
            if count * threads > HOPPER.registers:
                break
            try:
                curve.append((registers(count), warps(occupancy(threads, count).warps_per_sm)))
            except ValueError:
                break  # one CTA does not fit any more
        svg.line(curve, SERIES[index], width=2)
        _key(svg, 350, 90 + 18 * index, SERIES[index], f"{threads} threads")
    spot = occupancy(384, 168).warps_per_sm
    svg.circle(registers(168), warps(spot), 4.5, SERIES[1], tip="the wgmma rungs: 384 x 168")
    svg.text(registers(168) + 8, warps(spot) - 8, "the wgmma rungs", size=12, fill=SOFT)

    smem = Scale(0, 227, 570, 970)
    ctas = Scale(0, 8, 270, 70)
    _frame(
        svg,
        570,
        "Shared memory",
        Axis(smem, [(n, str(n)) for n in (0, 48, 113, 164, 227)], "KB a CTA (128 threads)"),
        Axis(ctas, [(n, str(n)) for n in (0, 2, 4, 6, 8)], "CTAs on an SM"),
    )
    steps = [
        (smem(kb), ctas(min(8, occupancy(128, 32, kb * 1024).ctas_per_sm))) for kb in range(228)
    ]
    svg.line(steps, SERIES[0], width=2)
    return svg


@dataclass(frozen=True)
class Point:
    """One kernel on a roofline: FLOP/byte, FLOP/s, name, colour index."""

    intensity: float
    flops_per_s: float
    name: str
    series: int = 0


@dataclass(frozen=True)
class Roof:
    """A ceiling with the words for its flat part and its slope, and its colour index."""

    flat: str
    slope: str
    line: Roofline
    series: int


def roofline_figure(roofs: Sequence[Roof], points: Sequence[Point], title: str = "Roofline") -> Svg:
    """Log-log: the ceilings, and kernels below them."""
    svg = Svg(1000, 580, title)
    low = min([0.2, *(p.intensity * 0.7 for p in points)])
    high = max([1500.0, *(p.intensity * 2 for p in points)])
    floor = min([1e12, *(p.flops_per_s * 0.6 for p in points)])
    x = Scale(low, high, 70, 880, log=True)
    y = Scale(floor, 2e15, 510, 50, log=True)
    ticks = [(v, f"{v:g}") for v in (0.1, 1, 10, 100, 1000) if low <= v <= high]
    levels = [(v * 1e12, f"{v:g}") for v in (0.1, 1, 10, 100, 1000) if v * 1e12 >= floor]
    draw_axes(
        svg,
        Axis(x, ticks, "FLOPs per byte fetched (arithmetic intensity)"),
        Axis(y, levels, "TFLOP/s"),
    )
    for roof in roofs:
        _roof(svg, x, y, roof)
    _points(svg, x, y, points)
    return svg


def _roof(svg: Svg, x: Scale, y: Scale, roof: Roof) -> None:
    line, colour = roof.line, SERIES[roof.series]
    start = max(x.low, y.low / line.bytes_per_s)
    path = [start, line.ridge_point, x.high]
    ends = [(x(v), y(line.attainable(v))) for v in path]
    svg.line(ends, colour, width=2)
    svg.text(ends[2][0] + 6, ends[2][1] + 4, roof.flat, size=12, fill=colour)
    if roof.flat:
        svg.line([ends[1], (ends[1][0], y(y.low))], colour, dash="3 4", opacity=0.6)
        words = f"ridge {line.ridge_point:.0f}"
        svg.text(ends[1][0] + 5, y(y.low) - 8, words, size=11, fill=colour)
    if roof.slope:
        (x0, y0), (x1, y1) = ends[0], ends[1]
        turn = math.degrees(math.atan2(y1 - y0, x1 - x0))
        at = x0 + 0.12 * (x1 - x0), y0 + 0.12 * (y1 - y0)
        # Slopes lie close together: the lowest, which has a flat part of its own, is named below.
        shift = 17 if roof.flat else -7
        svg.text(at[0], at[1] + shift, roof.slope, size=12, fill=colour, turn=turn)


def _points(svg: Svg, x: Scale, y: Scale, points: Sequence[Point]) -> None:
    """Dots, and labels pushed down until none covers another."""
    labels: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: -p.flops_per_s):
        at = x(point.intensity), y(point.flops_per_s)
        tip = f"{point.name}: {point.flops_per_s / 1e12:.1f} TFLOP/s"
        svg.circle(*at, 4.5, SERIES[point.series], tip=tip)
        place = at[1]
        for other_x, other_y in labels:
            if abs(other_x - at[0]) < 28 and place < other_y + 12:
                place = other_y + 12
        labels.append((at[0], place))
        if place > at[1] + 2:
            svg.line([(at[0] + 4, at[1] + 2), (at[0] + 11, place)], SOFT, width=0.8)
        svg.text(at[0] + 12, place + 4, point.name, size=11, fill=INK)


@dataclass(frozen=True)
class Bar:
    """One row of the ladder chart. `spread` is low and high, in the unit of the chart."""

    label: str
    value: float
    note: str
    series: int
    spread: tuple[float, float] | None = None


def bar_figure(
    bars: Sequence[Bar], marks: Sequence[tuple[str, float]], unit: str, title: str
) -> Svg:
    """Horizontal bars, with dashed lines for what they are held against (name, value)."""
    row = 30
    top = 30 + 18 * len(marks)
    svg = Svg(1000, top + row * len(bars) + 50, title)
    most = max([b.value for b in bars] + [v for _, v in marks] + [1e-9]) * 1.02
    x = Scale(0, most, 250, 850)
    bottom = top + row * len(bars)
    for index, bar in enumerate(bars):
        y = top + row * index
        svg.text(240, y + 19, bar.label, size=13, anchor="end")
        width = max(x(bar.value) - x(0), 1)
        tip = f"{bar.label}: {bar.value:.1f} {unit}"
        svg.rect(x(0), y + 5, width, row - 10, SERIES[bar.series], radius=2, opacity=0.9, tip=tip)
        if bar.spread:
            low, high = bar.spread
            svg.line([(x(low), y + row / 2), (x(high), y + row / 2)], INK, width=1.5)
        svg.text(992, y + 19, bar.note, size=12, anchor="end", fill=SOFT)
    # The largest on top: no line then crosses the words of another, which stand to its left.
    for index, (name, value) in enumerate(sorted(marks, key=lambda mark: -mark[1])):
        colour = ACCENT if name == "cuBLAS" else SOFT
        line = 22 + 18 * index
        svg.line([(x(value), line - 10), (x(value), bottom)], colour, dash="5 4", width=1.5)
        anchor, shift = ("end", -6) if x(value) > 600 else ("start", 6)
        words = f"{name}: {value:.0f}"
        svg.text(x(value) + shift, line, words, size=12, anchor=anchor, fill=colour)
    svg.text(x(0), bottom + 26, f"{unit}, longer is faster", size=12, fill=SOFT)
    return svg
