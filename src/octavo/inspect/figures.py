"""Owns every picture: curves and charts, and those of space and time: swizzles, schedules, the ring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from octavo.inspect.page import BAD, GOOD, INK, PANEL, SERIES, SOFT, canvas, style, tip
from octavo.inspect.report_data import Group
from octavo.kernels.matmul import schedule
from octavo.kernels.matmul.barriers import ring_timeline
from octavo.kernels.matmul.occupancy import occupancy
from octavo.kernels.matmul.quantization import gemm_efficiency, tile_quantization, wave_quantization
from octavo.kernels.matmul.roofline import H200, Device, Roofline, device_roofline, peak_flops
from octavo.kernels.matmul.swizzle import SWIZZLES, Swizzle, column_conflicts

_SIDE = 32  # tiles on each side of the schedule picture: 4096 x 8192 in 128x256 tiles
_TICKS, _LOAD, _MATH = 36, 6, 2


def pictures() -> dict[str, Any]:
    """The pictures that need no measurement, by the name of their file in docs/figures."""
    return {
        "swizzle": swizzle_figure(),
        "ring": ring_figure(),
        "schedules": schedule_figure(),
        "quantization": quantization_figure(),
        "occupancy": occupancy_figure(),
        "roofline": roofline_figure(device_roofs(H200), [], "Roofline of an H200"),
    }


@style()
def quantization_figure() -> Any:
    """Useful work against size: edge tiles, the last wave, and both together."""
    figure, axes = canvas(1000, 640, "EW;BB", "Tile and wave quantization")
    edge, wave, both = axes["E"], axes["W"], axes["B"]
    for block in (32, 64, 128):
        useful = [tile_quantization(n, n, block, block).efficiency for n in range(1, 513)]
        edge.plot(range(1, 513), useful, label=f"{block}x{block} tiles")
    spot = tile_quantization(33, 33, 32, 32).efficiency
    _mark(edge, 33, spot, f"33x33, 32-tiles: {spot:.0%}", SERIES[0])
    _name(edge, "Edge tiles", "M = N", "useful part of the work", (32, 128, 256, 384, 512))
    tiles = range(1, 4 * 132 + 1)
    wave.plot(tiles, [wave_quantization(n, 132).efficiency for n in tiles])
    spot = wave_quantization(133, 132).efficiency
    _mark(wave, 133, spot, f"133 tiles, 2 waves: {spot:.0%}", SERIES[0])
    _name(wave, "The last wave", "tiles on 132 SMs", "busy part of the time", tiles[131::132])
    sizes = range(512, 8193, 64)
    for bm, bn in ((128, 128), (128, 256), (192, 256)):
        left = [gemm_efficiency(n, n, bm, bn, slots=H200.num_sms) for n in sizes]
        both.plot(sizes, left, label=f"{bm}x{bn}")
    across, up = "M = N, 132 SMs, one CTA each", "most of full speed that is left"
    _name(both, "Both, for square problems", across, up, range(1024, 8193, 1024))
    for ax in axes.values():
        ax.yaxis.set_major_formatter("{x:.0%}")
    edge.legend(loc="lower right")
    both.legend(loc="lower right", ncols=3)
    return figure


def _name(ax: Any, title: str, across: str, up: str, ticks: Sequence[int]) -> None:
    ax.set(title=title, xlabel=across, ylabel=up, ylim=(0, None), xticks=ticks, xticklabels=ticks)


def _mark(ax: Any, x: float, y: float, words: str, colour: str) -> None:
    """One point with its name beside it."""
    ax.plot([x], [y], "o", color=colour, ms=7, gid=tip(words))
    ax.annotate(words, (x, y), (9, -10), textcoords="offset points", color=SOFT)


@style()
def occupancy_figure() -> Any:
    """Resident warps against registers, and CTAs against shared memory, on one Hopper SM."""
    figure, axes = canvas(1000, 320, "RS", "Occupancy of a Hopper SM")
    left, right = axes["R"], axes["S"]
    for threads, most in ((128, 255), (384, 168), (1024, 64)):  # with more, not one CTA fits
        counts = range(16, most + 1)
        warps = [occupancy(threads, n).warps_per_sm for n in counts]
        left.plot(counts, warps, label=f"{threads} threads", lw=2)
    _mark(left, 168, occupancy(384, 168).warps_per_sm, "the wgmma rungs", SERIES[1])
    ticks = (32, 64, 96, 128, 168, 255)
    _name(left, "Registers", "registers a thread", "resident warps (of 64)", ticks)
    left.set_yticks(range(0, 65, 16))
    left.legend(loc="upper right")
    smem = range(228)
    right.plot(smem, [min(8, occupancy(128, 32, kb * 1024).ctas_per_sm) for kb in smem], lw=2)
    sizes = (0, 48, 113, 164, 227)
    _name(right, "Shared memory", "KB a CTA (128 threads)", "CTAs on an SM", sizes)
    return figure


# A ceiling: the words for its flat part and for its slope, the line, its colour.
Roof = tuple[str, str, Roofline, str]
# A kernel under it: FLOP/byte, TFLOP/s, name, colour.
Point = tuple[float, float, str, str]


def device_roofs(device: Device) -> list[Roof]:
    """DRAM with both arithmetic peaks, and the L1 caches together: 128 bytes a clock each."""
    l1 = device.num_sms * 128 * device.spec_clock * 1e6
    dram = f"DRAM, {device.dram_bytes_per_s / 1e12:.1f} TB/s"
    near = f"all L1 caches, {l1 / 1e12:.0f} TB/s"
    return [
        ("", near, Roofline(peak_flops(device, "bf16"), l1), SERIES[5]),
        ("bf16 peak", dram, device_roofline(device, "bf16"), SERIES[2]),
        ("fp32 peak", "", device_roofline(device, "fp32"), SERIES[0]),
    ]


@style()
def roofline_figure(roofs: Sequence[Roof], points: Sequence[Point], title: str) -> Any:
    """Log-log: the ceilings, and kernels below them."""
    figure, axes = canvas(1000, 560, "R", title)
    ax = axes["R"]
    low = min([0.2, *(x * 0.7 for x, _, _, _ in points)])
    high = max([1500.0, *(x * 2 for x, _, _, _ in points)])
    floor = min([1.0, *(y * 0.6 for _, y, _, _ in points)])
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(floor, 2000), ylabel="TFLOP/s")
    ax.set_xlabel("FLOPs per byte fetched (arithmetic intensity)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    for flat, slope, line, colour in roofs:
        look = {"color": colour, "textcoords": "offset points", "annotation_clip": False}
        rate, ridge, top = line.bytes_per_s / 1e12, line.ridge_point, line.flops_per_s / 1e12
        start = max(low, floor / rate)
        ax.plot((start, ridge, high), (start * rate, top, top), color=colour, lw=2)
        if flat:
            ax.annotate(flat, (high, top), (4, -4), **look)
            ax.plot((ridge, ridge), (floor, top), color=colour, ls=":", lw=1)
            ax.annotate(f"ridge {ridge:.0f}", (ridge, floor), (5, 6), **look)
        if slope:
            # Slopes lie close together: the lowest, which has a flat part of its own, is named below.
            at, (shift, side) = start * 1.6, (0.92, "top") if flat else (1.03, "bottom")
            label = ax.text(at, at * rate * shift, slope, color=colour, va=side)
            turn = math.degrees(math.atan(rate))
            label.set(rotation=turn, transform_rotates_text=True, rotation_mode="anchor")
    _points(ax, points)
    return figure


def _points(ax: Any, points: Sequence[Point]) -> None:
    """Dots, and labels pushed down until none covers another."""
    (low, high), (floor, top) = ax.get_xlim(), ax.get_ylim()
    near, gap = (high / low) ** 0.035, (top / floor) ** 0.025  # a label's width and height
    labels: list[tuple[float, float]] = []
    for x, y, name, colour in sorted(points, key=lambda point: -point[1]):
        place = y
        for other_x, other_y in labels:
            if 1 / near < other_x / x < near:
                place = min(place, other_y / gap)
        labels.append((x, place))
        ax.plot([x], [y], "o", color=colour, ms=8, gid=tip(f"{name}: {y:.1f} TFLOP/s"))
        ax.plot([x, x * near**0.35], [y, place], color=SOFT, lw=0.8, zorder=1)
        ax.text(x * near**0.4, place, name, size=11, va="center")


@style()
def ladder_figure(group: Group, marks: Mapping[str, float], colour: str) -> Any:
    """The rungs of one group as bars, with dashed lines for what they are held against, TFLOP/s."""
    rows = group.rungs
    height = 30 * len(rows) + 20 * len(marks) + 50
    figure, axes = canvas(1000, height, "B", f"Speed of the rungs, {group.name}")
    ax = axes["B"]
    names = [row.rung for row in rows]
    ax.barh(names, [row.tflops for row in rows], 0.66, color=colour, alpha=0.9)
    for index, (row, patch) in enumerate(zip(rows, ax.patches, strict=True)):
        patch.set_gid(tip(f"{row.rung}: {row.tflops:.1f} TFLOP/s"))
        note = f"{row.tflops:.1f} · {row.vs_cublas:.2f}x" if row.ok else "WRONG"
        ax.text(1.01, index, note, va="center", color=SOFT, transform=ax.get_yaxis_transform())
    ax.hlines(names, *zip(*(row.spread_tflops for row in rows), strict=True), color=INK, lw=1.5)
    # The largest on top: no line then crosses the words of another, which stand to its left.
    for step, (name, value) in enumerate(sorted(marks.items(), key=lambda mark: mark[1])):
        shade, place = GOOD if name == "cuBLAS" else SOFT, -0.9 - 0.65 * step
        ax.plot([value] * 2, [place - 0.3, len(rows) - 0.5], "--", color=shade, lw=1.5)
        look = {"textcoords": "offset points", "ha": "right", "va": "center", "color": shade}
        ax.annotate(f"{name}: {value:.0f}", (value, place), (-6, 0), **look)
    ax.set(xlabel="TFLOP/s, longer is faster", xlim=(0, None))
    ax.set_ylim(len(rows) - 0.5, -0.9 - 0.65 * len(marks))
    ax.tick_params(axis="y", labelcolor=INK)
    ax.grid(False)
    return figure


@style()
def access_figure(document: Mapping[str, Any]) -> Any:
    """Useful DRAM bandwidth by stride, and shared-memory cycles by bank conflict."""
    figure, axes = canvas(1000, 320, "SB", "What access patterns cost")
    reads = {int(k): float(v["useful"]) for k, v in document["strided_read"].items()}
    banks = {int(k): float(v) for k, v in document["smem_cycles_per_load"].items() if k.isdecimal()}
    for ax, data in zip(axes.values(), (reads, banks), strict=True):
        ax.set_xscale("log", base=2)
        ax.plot(data.keys(), data.values(), "o-", lw=2, ms=7)
        ax.minorticks_off()
    _name(axes["S"], "Strided reads of DRAM", "stride, words of 4 bytes", "useful GB/s", [*reads])
    _name(axes["B"], "Bank conflicts", "lanes that meet in a bank", "cycles a load", [*banks])
    return figure


@style()
def swizzle_figure() -> Any:
    """Where the 16-byte chunks of a tile lie, for each mode; chunk 0 of 8 rows is outlined."""
    panels: list[tuple[str, Swizzle | None, int]] = [("128-byte rows, no swizzle", None, 128)]
    panels += [(f"{name} swizzle", s, s.span_bytes) for name, s in reversed(SWIZZLES.items())]
    title = "Shared memory tiles with and without a swizzle"
    figure, axes = canvas(1040, 360, "0123", title)
    for ax, (name, mode, row_bytes) in zip(axes.values(), panels, strict=True):
        _swizzle_panel(ax, name, mode, row_bytes)
    axes["0"].set_ylabel("addresses, 128 bytes a line")
    return figure


def _swizzle_panel(ax: Any, name: str, mode: Swizzle | None, row_bytes: int) -> None:
    rows = 128 // row_bytes
    for row in range(8 * rows):
        for chunk in range(row_bytes // 16):
            plain = row * row_bytes + chunk * 16
            place = mode.apply(plain) if mode else plain
            x, y = place % 128 // 16, place // 128
            picked = chunk == 0 and row < 8  # what one read wants
            words = tip(f"row {row}, chunk {chunk}: byte {plain} lies at {place}")
            if picked:
                ax.bar(x, 0.94, 0.94, y - 0.47, color=SERIES[0], ec=INK, lw=2, gid=words, zorder=2)
            else:
                ax.bar(x, 1, 1, y - 0.5, color=SERIES[chunk], alpha=0.28, ec=PANEL, gid=words)
            colour, size = PANEL if picked else INK, 10 if row < 10 else 9
            ax.text(x, y, f"{row}.{chunk}", ha="center", va="center", size=size, color=colour)
    for slot in range(8):
        ax.text(slot, -0.7, 4 * slot, ha="center", size=10, color=SOFT)
    words = "a line" if rows == 1 else f"{rows} rows a line"
    ax.text(-0.5, -1.95, name, weight="bold", size=14)
    ax.text(-0.5, -1.35, f"{row_bytes}-byte rows, {words}", color=SOFT)
    passes = column_conflicts(mode, row_bytes, 0)
    words = "1 pass: no conflict" if passes == 1 else f"{passes} passes: {passes}-way bank conflict"
    colour = GOOD if passes == 1 else BAD
    ax.text(-0.5, 8.5, words, weight="bold", size=13, color=colour)
    ax.text(-0.5, 9.2, "to read chunk 0 of rows 0-7", color=SOFT)
    _plain(ax, (-0.5, 7.5), (9.3, -2.5))


def _plain(ax: Any, xlim: tuple[float, float], ylim: tuple[float, float]) -> None:
    """Square cells without axes; y grows downwards."""
    ax.set(aspect="equal", xlim=xlim, ylim=ylim, xticks=(), yticks=())
    ax.spines[:].set_visible(False)


@style()
def schedule_figure() -> Any:
    """Three orders over 32 x 32 tiles, coloured by wave, with the panels that wave 1 reads."""
    orders: dict[str, schedule.Order] = {
        "Row by row": schedule.naive_order(_SIDE, _SIDE),
        "Grouped, 8 rows at a time": schedule.grouped_order(_SIDE, _SIDE, 8),
        "Hilbert curve": schedule.hilbert_order(_SIDE, _SIDE),
    }
    figure, axes = canvas(1010, 460, "012", "Three orders of output tiles")
    for ax, (name, order) in zip(axes.values(), orders.items(), strict=True):
        _schedule_panel(ax, name, order)
    return figure


def _schedule_panel(ax: Any, name: str, order: schedule.Order) -> None:
    wave_of = {tile: index // H200.num_sms for index, tile in enumerate(order)}
    for m in range(_SIDE):
        start = 0
        for wave, run in groupby(wave_of[m, n] for n in range(_SIDE)):
            width, alpha = len(list(run)), 0.85 if wave == 0 else 0.32
            ax.barh(m, width, 1, start - 0.5, color=SERIES[wave % 8], alpha=alpha, lw=0)
            start += width
    ax.plot([n for _, n in order], [m for m, _ in order], color=INK, lw=0.8, alpha=0.7)
    ax.plot(order[0][1], order[0][0], "o", color=INK, ms=6)
    first = order[: H200.num_sms]
    rows, columns = {m for m, _ in first}, {n for _, n in first}
    ax.barh(list(rows), 0.9, 0.9, -1.9, color=SERIES[0])
    ax.bar(list(columns), 0.9, 0.9, -1.9, color=SERIES[0])
    ax.text(-1.4, _SIDE + 0.5, "A", ha="center", color=SOFT)
    ax.text(_SIDE, -1.2, "B", color=SOFT)
    machine = {"num_ctas": H200.num_sms, "l2_bytes": H200.l2_bytes}
    found = schedule.simulate_l2(order, block_m=128, block_n=256, k=8192, **machine)
    panels = f"{len(rows)} + {len(columns)} = {len(rows) + len(columns)}"
    ax.text(-0.5, _SIDE + 3, f"wave 1 reads {panels} panels", size=14, weight="bold")
    words = (
        f"DRAM: {found.dram_bytes / 1e9:.2f} GB (at least {found.compulsory_bytes / 1e9:.2f})\n"
        f"L2 serves {found.hit_rate:.0%} of the {found.requested_bytes / 1e9:.1f} GB asked for"
    )
    ax.text(-0.5, _SIDE + 4, words, size=13, color=SOFT, va="top")
    ax.set_title(name)
    _plain(ax, (-2, _SIDE + 1), (_SIDE + 7, -2))


@style()
def ring_figure() -> Any:
    """The same loads and the same math with 1, 2 and 4 stages."""
    rows = {stages: stages + 1 for stages in (1, 2, 4)}
    height = sum(26 * count + 40 for count in rows.values()) + 40
    title = "A ring of 1, 2 and 4 stages"
    figure, axes = canvas(1000, height, "1;2;4", title, height_ratios=list(rows.values()))
    for stages, ax in zip(rows, axes.values(), strict=True):
        _ring_panel(ax, stages)
    ax.set_xlabel("time", loc="right")
    words = "TMA fills the stage (producer waits for empty); number: parity of the full barrier"
    ax.barh(0, 0, color=SERIES[0], alpha=0.75, label=words)
    ax.barh(0, 0, color=SERIES[2], label="wgmma reads it (consumer waits for full)")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _ring_panel(ax: Any, stages: int) -> None:
    busy = min(1.0, stages * _MATH / (_LOAD + _MATH))
    plural = "stage" if stages == 1 else "stages"
    ax.set_title(f"{stages} {plural}: tensor cores busy {busy:.0%} of the time")
    for span in ring_timeline(stages, _TICKS, load_ticks=_LOAD, math_ticks=_MATH):
        land, end = min(span.land, _TICKS), min(span.end, _TICKS)
        if span.issue < _TICKS:
            row, middle = span.at.stage, (span.issue + land) / 2
            ax.barh(row, land - span.issue, 0.75, span.issue, color=SERIES[0], alpha=0.75, ec=PANEL)
            look = {"ha": "center", "va": "center", "color": PANEL}
            ax.text(middle, row, span.at.full_parity, size=11, **look)
        if span.start < _TICKS:
            for row in (span.at.stage, stages):
                ax.barh(row, end - span.start, 0.75, span.start, color=SERIES[2], ec=PANEL)
    names = [*(f"stage {row}" for row in range(stages)), "tensor cores"]
    ax.set(xlim=(0, _TICKS), ylim=(stages + 0.5, -0.5), xticks=(), yticks=range(stages + 1))
    ax.set_yticklabels(names)
    ax.spines["left"].set_visible(True)
    ax.spines["bottom"].set_visible(False)
    ax.grid(False)
