"""Owns the picture of a producer/consumer ring over time."""

from __future__ import annotations

from octavo.inspect.svg import GRID, INK, PANEL, SERIES, SOFT, Svg
from octavo.kernels.matmul.barriers import ring_timeline

_TICKS = 36
_LOAD, _MATH = 6, 2
_ROW, _TICK = 24, 24.5
_LEFT = 108


def ring_figure() -> Svg:
    """The same loads and the same math with 1, 2 and 4 stages."""
    choices = (1, 2, 4)
    height = sum(_ROW * (stages + 1) + 62 for stages in choices) + 40
    svg = Svg(1000, height, "A ring of 1, 2 and 4 stages")
    svg.rect(_LEFT, 12, 16, 12, SERIES[0], opacity=0.75)
    svg.text(_LEFT + 22, 23, "TMA fills the stage (producer waits for empty)", size=12)
    svg.rect(_LEFT + 330, 12, 16, 12, SERIES[2])
    svg.text(_LEFT + 352, 23, "wgmma reads it (consumer waits for full)", size=12)
    svg.text(_LEFT + 640, 23, "number: parity of the full barrier", size=12, fill=SOFT)
    top = 52.0
    for stages in choices:
        _panel(svg, top, stages)
        top += _ROW * (stages + 1) + 62
    return svg


def _panel(svg: Svg, top: float, stages: int) -> None:
    spans = [
        s
        for s in ring_timeline(stages, _TICKS, load_ticks=_LOAD, math_ticks=_MATH)
        if s.issue < _TICKS
    ]
    busy = min(1.0, stages * _MATH / (_LOAD + _MATH))
    plural = "stage" if stages == 1 else "stages"
    words = f"{stages} {plural}: tensor cores busy {busy:.0%} of the time"
    svg.text(_LEFT, top + 4, words, size=14, bold=True)
    first = top + 16
    for row in range(stages + 1):
        y = first + row * _ROW
        name = f"stage {row}" if row < stages else "tensor cores"
        svg.text(_LEFT - 10, y + 16, name, size=12, anchor="end", fill=SOFT)
        svg.line([(_LEFT, y + _ROW), (_LEFT + _TICKS * _TICK, y + _ROW)], GRID)
    for span in spans:
        y = first + span.at.stage * _ROW
        _bar(svg, y, span.issue, span.land, SERIES[0], 0.75, str(span.at.full_parity))
        _bar(svg, y, span.start, span.end, SERIES[2], 1, "")
        _bar(svg, first + stages * _ROW, span.start, span.end, SERIES[2], 1, "")
    svg.line([(_LEFT, first), (_LEFT, first + (stages + 1) * _ROW)], SOFT)
    svg.text(
        _LEFT + _TICKS * _TICK,
        first + (stages + 1) * _ROW + 16,
        "time",
        size=11,
        anchor="end",
        fill=INK,
    )


def _bar(svg: Svg, y: float, start: int, end: int, colour: str, opacity: float, words: str) -> None:
    end = min(end, _TICKS)
    if start >= end:
        return
    x, width = _LEFT + start * _TICK, (end - start) * _TICK
    svg.rect(x + 0.5, y + 3, width - 1, _ROW - 6, colour, radius=2, opacity=opacity)
    if words:
        svg.text(x + width / 2, y + 16, words, size=11, anchor="middle", fill=PANEL)
