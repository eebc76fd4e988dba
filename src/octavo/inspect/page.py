"""Owns templates: our HTML pages (each one file, no network, light and dark), and words of remarks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from octavo.inspect.drawing import svg


@cache
def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
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
