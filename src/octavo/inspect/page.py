"""Owns the look: pages and words from templates, matplotlib figures as SVG, light and dark.

A page is one file and needs no network. Pictures have the colours of page.css by their light values;
inside a page they become its CSS variables again. An artist whose gid is `tip(words)` shows the words
when the pointer rests on it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from octavo.errors import KernelError

_FOLDER = Path(__file__).parent
_LIGHT = (_FOLDER / "page.css").read_text("utf-8").split("@media")[0]
PALETTE = dict(re.findall(r"--([\w-]+): (#\w+)", _LIGHT))
INK, SOFT, LINE, PANEL = (PALETTE[name] for name in ("ink", "soft", "line", "panel"))
GOOD, BAD = PALETTE["accent"], PALETTE["warn"]
SERIES = [PALETTE[f"c{number}"] for number in range(8)]
_SHEET = Template((_FOLDER / "figures.mplstyle").read_text("utf-8")).safe_substitute(PALETTE)
_STYLE = dict(re.findall(r"^([\w.-]+): (.*)$", _SHEET, re.MULTILINE))


@contextmanager
def style(**more: str) -> Iterator[None]:
    """Our look, for code that draws. Also a decorator. Raises KernelError without matplotlib."""
    try:
        from matplotlib.style import context
    except ImportError as error:
        raise KernelError("pictures need matplotlib: pip install -e '.[kernels]'") from error
    with context(["default", {**_STYLE, **more}]):
        yield


def canvas(
    width: float, height: float, mosaic: str, title: str, **layout: Any
) -> tuple[Any, dict[str, Any]]:
    """A figure of `width` x `height` points and its axes by the letters of a matplotlib mosaic.

    `title` is the picture's text for those who do not see it.
    """
    from matplotlib.figure import Figure

    figure = Figure((width / 72, height / 72), layout="constrained", label=title)
    return figure, figure.subplot_mosaic(mosaic, **layout)


def tip(words: str) -> str:
    return f"tip:{words}"


def svg(figure: Any, *, themed: bool = False) -> str:
    """The picture as SVG text: for a page that has page.css if `themed`, else for a file."""
    buffer = io.StringIO()
    title = figure.get_label()
    with style(**{"svg.hashsalt": title}):  # names in it are unique on a page, and repeatable
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("xlink:href", "href").replace('pt"', '"', 2)
    drop = r'\s*<metadata>.*?</metadata>|<style.*?</style>| xmlns:xlink="[^"]*"| version="[^"]*"'
    text = re.sub(drop, "", text, flags=re.DOTALL)
    group = r'<g id="(tip:)?([^"]*)"'
    text = re.sub(group, lambda m: f"<g><title>{m[2]}</title" if m[1] else "<g", text)
    text = text.replace(">", f' role="img">\n<title>{escape(title)}</title>', 1)
    text = re.sub(r"\n(?=[LMQCz])", "", text)  # one line a path, a hundredth of a point
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)
    if themed:
        for name, colour in PALETTE.items():
            text = text.replace(colour, f"var(--{name})")
    return text


@cache
def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["svg"] = lambda figure: Markup(svg(figure, themed=True))
    return found


def render(template: str, **values: Any) -> str:
    """The page that a template of this folder makes of `values`; its words are escaped."""
    return _templates().get_template(template).render(**values)


def words(name: str, **facts: Any) -> str:
    """What the macro `name` of remarks.txt says of some facts, in one line of plain text."""
    said = getattr(_templates().get_template("remarks.txt").module, name)(**facts)
    return " ".join(said.split())
