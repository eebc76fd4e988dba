"""Owns the pictures of space and time: swizzled shared memory, tile schedules, a ring of stages."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from octavo.inspect.drawing import BAD, GOOD, INK, PANEL, SERIES, SOFT, canvas, style, tip
from octavo.inspect.figures import (
    device_roofs,
    occupancy_figure,
    quantization_figure,
    roofline_figure,
)
from octavo.kernels.matmul.barriers import ring_timeline
from octavo.kernels.matmul.roofline import H200
from octavo.kernels.matmul.schedule import (
    Order,
    grouped_order,
    hilbert_order,
    naive_order,
    simulate_l2,
)
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
    orders: dict[str, Order] = {
        "Row by row": naive_order(_SIDE, _SIDE),
        "Grouped, 8 rows at a time": grouped_order(_SIDE, _SIDE, 8),
        "Hilbert curve": hilbert_order(_SIDE, _SIDE),
    }
    figure, axes = canvas(1010, 460, "012", "Three orders of output tiles")
    for ax, (name, order) in zip(axes.values(), orders.items(), strict=True):
        _schedule_panel(ax, name, order)
    return figure


def _schedule_panel(ax: Any, name: str, order: Order) -> None:
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
    found = simulate_l2(order, block_m=128, block_n=256, k=8192, **machine)
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
            ax.text(
                middle, row, span.at.full_parity, size=11, ha="center", va="center", color=PANEL
            )
        if span.start < _TICKS:
            for row in (span.at.stage, stages):
                ax.barh(row, end - span.start, 0.75, span.start, color=SERIES[2], ec=PANEL)
    names = [*(f"stage {row}" for row in range(stages)), "tensor cores"]
    ax.set(xlim=(0, _TICKS), ylim=(stages + 0.5, -0.5), xticks=(), yticks=range(stages + 1))
    ax.set_yticklabels(names)
    ax.spines["left"].set_visible(True)
    ax.spines["bottom"].set_visible(False)
    ax.grid(False)
