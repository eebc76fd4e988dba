"""Owns drawing: a small SVG writer, linear and logarithmic scales, and axes.

Colours are the CSS variables of page.css, so pictures follow the page's light or dark theme; a
picture that stands alone (docs/figures) carries its own light palette and background.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

SERIES = tuple(f"var(--c{n})" for n in range(8))
INK, SOFT, GRID, LINE = "var(--ink)", "var(--soft)", "var(--grid)", "var(--line)"
PANEL, MARK, ACCENT, WARN = "var(--panel)", "var(--mark)", "var(--accent)", "var(--warn)"

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_ALONE = """<style>
svg { --ink: #1c2128; --soft: #57606a; --line: #d9dcd6; --grid: #e8eae5; --panel: #ffffff;
  --accent: #2f6f4f; --warn: #a3412f; --mark: #fff3c4; --c0: #2f6db5; --c1: #d9772b; --c2: #2f8f66;
  --c3: #8457b0; --c4: #c2453f; --c5: #8a6d1f; --c6: #1f8a99; --c7: #b0467f; }
</style>
<rect width="100%" height="100%" fill="#ffffff"/>
"""


@dataclass
class Svg:
    """A picture of `width` x `height` user units; y grows downwards. `title` is its text for all."""

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def inline(self) -> str:
        """For an HTML page that has page.css."""
        return self._document("")

    def standalone(self) -> str:
        """For a file of its own."""
        return self._document(_ALONE) + "\n"

    def _document(self, head: str) -> str:
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}"'
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} font-family="{_FONT}">\n'
            f"<title>{escape(self.title)}</title>\n{head}{body}\n</svg>"
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        stroke: str = "none",
        stroke_width: float = 1,
        radius: float = 0,
        opacity: float = 1,
        tip: str = "",
    ) -> None:
        self._add(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
            f' rx="{_n(radius)}" fill="{fill}" stroke="{stroke}" stroke-width="{_n(stroke_width)}"'
            f' opacity="{_n(opacity)}"',
            "rect",
            tip,
        )

    def circle(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        self._add(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"'
            f' stroke="{PANEL}" stroke-width="1.5"',
            "circle",
            tip,
        )

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        *,
        width: float = 1,
        dash: str = "",
        opacity: float = 1,
    ) -> None:
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{_n(width)}"'
            f' stroke-linejoin="round" opacity="{_n(opacity)}"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
        turn: float = 0,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        rotate = f' transform="rotate({_n(turn)} {_n(x)} {_n(y)})"' if turn else ""
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"'
            f' fill="{fill}"{weight}{rotate}>{escape(words)}</text>'
        )

    def _add(self, start: str, tag: str, tip: str) -> None:
        # A <title> inside a shape is its tooltip.
        end = f"><title>{escape(tip)}</title></{tag}>" if tip else "/>"
        self.parts.append(start + end)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Scale:
    """Maps data low..high to pixels start..end, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


@dataclass(frozen=True)
class Axis:
    """A scale with its ticks (value, label) and a title."""

    scale: Scale
    ticks: Sequence[tuple[float, str]]
    title: str


def draw_axes(svg: Svg, x: Axis, y: Axis) -> None:
    """Grid lines, tick labels and titles of a plot whose area the two scales span."""
    left, right = x.scale.start, x.scale.end
    bottom, top = y.scale.start, y.scale.end
    for value, label in y.ticks:
        at = y.scale(value)
        svg.line([(left, at), (right, at)], GRID)
        svg.text(left - 8, at + 4, label, size=12, anchor="end", fill=SOFT)
    for value, label in x.ticks:
        at = x.scale(value)
        svg.line([(at, bottom), (at, bottom + 4)], LINE)
        svg.text(at, bottom + 18, label, size=12, anchor="middle", fill=SOFT)
    svg.line([(left, bottom), (right, bottom)], LINE)
    svg.text((left + right) / 2, bottom + 38, x.title, size=13, anchor="middle", fill=SOFT)
    svg.text(left, top - 10, y.title, size=13, fill=SOFT)


def percent_ticks(step: int = 25) -> list[tuple[float, str]]:
    return [(p / 100, f"{p}%") for p in range(0, 101, step)]
