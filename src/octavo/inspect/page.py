"""Owns the making of our HTML pages: each one file, no network, light and dark, from a template."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from octavo.inspect.drawing import svg


@cache
def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["svg"] = lambda figure: Markup(svg(figure, themed=True))
    return found


def render(template: str, **values: Any) -> str:
    """The page that a template of this folder makes of `values`; its words are escaped."""
    return _templates().get_template(template).render(**values)
