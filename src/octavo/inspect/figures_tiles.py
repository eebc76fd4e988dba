"""Owns the pictures of layouts in space: swizzled shared memory and tile schedules."""

from __future__ import annotations

from octavo.inspect.svg import ACCENT, INK, LINE, PANEL, SERIES, SOFT, WARN, Svg
from octavo.kernels.matmul.roofline import H200
from octavo.kernels.matmul.schedule import (
    L2Reuse,
    Order,
    grouped_order,
    hilbert_order,
    naive_order,
    simulate_l2,
)
from octavo.kernels.matmul.swizzle import SWIZZLES, Swizzle, column_conflicts

_CELL = 27
_SIDE = 32  # tiles on each side of the schedule picture: 4096 x 8192 in 128x256 tiles
_SLOTS = 8  # 16-byte slots in one 128-byte line of banks


def swizzle_figure() -> Svg:
    """Where the 16-byte chunks of a tile lie, for each mode; chunk 0 of 8 rows is outlined."""
    panels: list[tuple[str, Swizzle | None, int]] = [("128-byte rows, no swizzle", None, 128)]
    panels += [(f"{s.name} swizzle", s, s.span_bytes) for s in reversed(SWIZZLES.values())]
    pitch = _SLOTS * _CELL + 36
    svg = Svg(len(panels) * pitch + 40, 360, "Shared memory tiles with and without a swizzle")
    for index, (name, mode, row_bytes) in enumerate(panels):
        _swizzle_panel(svg, 40 + index * pitch, name, mode, row_bytes)
    svg.text(14, 190, "addresses, 128 bytes a line", size=12, anchor="middle", fill=SOFT, turn=-90)
    return svg


def _swizzle_panel(svg: Svg, left: float, name: str, mode: Swizzle | None, row_bytes: int) -> None:
    chunks = row_bytes // 16
    top = 76
    svg.text(left, 28, name, size=15, bold=True)
    rows = 128 // row_bytes
    words = "a line" if rows == 1 else f"{rows} rows a line"
    svg.text(left, 47, f"{row_bytes}-byte rows, {words}", size=12, fill=SOFT)
    for slot in range(_SLOTS):
        at = left + (slot + 0.5) * _CELL
        svg.text(at, top - 6, f"{4 * slot}", size=10, anchor="middle", fill=SOFT)
    chosen = []
    for row in range(8 * rows):
        for chunk in range(chunks):
            plain = row * row_bytes + chunk * 16
            place = mode.apply(plain) if mode else plain
            x, y = left + place % 128 // 16 * _CELL, top + place // 128 * _CELL
            picked = chunk == 0 and row < 8
            svg.rect(
                x,
                y,
                _CELL,
                _CELL,
                SERIES[chunk],
                stroke=PANEL,
                opacity=0.9 if picked else 0.28,
                tip=f"row {row}, chunk {chunk}: byte {plain} lies at {place}",
            )
            colour = PANEL if picked else INK
            label = f"{row}.{chunk}"
            size = 10 if row < 10 else 9
            svg.text(x + _CELL / 2, y + 17, label, size=size, anchor="middle", fill=colour)
            if picked:
                chosen.append((x, y))
    for x, y in chosen:
        svg.rect(x + 1, y + 1, _CELL - 2, _CELL - 2, "none", stroke=INK, stroke_width=2)
    passes = column_conflicts(mode, row_bytes, 0)
    good = passes == 1
    words = "1 pass: no conflict" if good else f"{passes} passes: {passes}-way bank conflict"
    svg.text(left, top + 8 * _CELL + 26, words, size=14, bold=True, fill=ACCENT if good else WARN)
    svg.text(left, top + 8 * _CELL + 44, "to read chunk 0 of rows 0-7", size=12, fill=SOFT)


def schedule_figure() -> Svg:
    """Three orders over 32 x 32 tiles, coloured by wave, with the panels that wave 1 reads."""
    orders: list[tuple[str, Order]] = [
        ("Row by row", naive_order(_SIDE, _SIDE)),
        ("Grouped, 8 rows at a time", grouped_order(_SIDE, _SIDE, 8)),
        ("Hilbert curve", hilbert_order(_SIDE, _SIDE)),
    ]
    svg = Svg(1010, 478, "Three orders of output tiles")
    for index, (name, order) in enumerate(orders):
        _schedule_panel(svg, 30 + index * 332, name, order)
    return svg


def reuse(order: Order, k: int) -> L2Reuse:
    """The L2 model for 128x256 tiles on an H200."""
    return simulate_l2(
        order, block_m=128, block_n=256, k=k, num_ctas=H200.num_sms, l2_bytes=H200.l2_bytes
    )


def _schedule_panel(svg: Svg, left: float, name: str, order: Order) -> None:
    cell, top = 9, 66
    edge = _SIDE * cell
    svg.text(left, 24, name, size=15, bold=True)
    wave_of = {tile: index // H200.num_sms for index, tile in enumerate(order)}
    for m in range(_SIDE):
        for n, width in _runs([wave_of[m, n] for n in range(_SIDE)]):
            wave = wave_of[m, n]
            colour, strong = SERIES[wave % len(SERIES)], 0.85 if wave == 0 else 0.32
            svg.rect(left + n * cell, top + m * cell, width * cell, cell, colour, opacity=strong)
    path = [(left + (n + 0.5) * cell, top + (m + 0.5) * cell) for m, n in order]
    svg.line(path, INK, width=0.8, opacity=0.7)
    svg.circle(*path[0], 3.5, INK)
    svg.rect(left, top, edge, edge, "none", stroke=LINE)
    first = order[: H200.num_sms]
    for m in {m for m, _ in first}:
        svg.rect(left - 12, top + m * cell, 8, cell - 1, SERIES[0], tip=f"A panel {m}")
    for n in {n for _, n in first}:
        svg.rect(left + n * cell, top - 12, cell - 1, 8, SERIES[0], tip=f"B panel {n}")
    svg.text(left - 8, top + edge + 16, "A", size=11, anchor="middle", fill=SOFT)
    svg.text(left + edge, top - 18, "B", size=11, anchor="end", fill=SOFT)
    found = reuse(order, 8192)
    svg.text(left, top + edge + 36, f"wave 1 reads {_panels(first)} panels", size=14, bold=True)
    for index, words in enumerate(
        (
            f"DRAM: {found.dram_bytes / 1e9:.2f} GB (at least {found.compulsory_bytes / 1e9:.2f})",
            f"L2 serves {found.hit_rate:.0%} of the {found.requested_bytes / 1e9:.1f} GB asked for",
        )
    ):
        svg.text(left, top + edge + 57 + 19 * index, words, size=13, fill=SOFT)


def _panels(tiles: Order) -> str:
    rows, columns = len({m for m, _ in tiles}), len({n for _, n in tiles})
    return f"{rows} + {columns} = {rows + columns}"


def _runs(values: list[int]) -> list[tuple[int, int]]:
    """Start and length of each run of equal values."""
    starts = [i for i, v in enumerate(values) if i == 0 or values[i - 1] != v]
    return [(a, b - a) for a, b in zip(starts, [*starts[1:], len(values)], strict=True)]
