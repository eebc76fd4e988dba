"""Owns the frame of our HTML pages: one file, no network, light and dark, and its small helpers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path

_HERE = Path(__file__).parent

_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main{wide}>
{body}
</main>
</body>
</html>
"""


@cache
def asset(name: str) -> str:
    """Text of a file that ships beside this module."""
    return (_HERE / name).read_text()


def page(title: str, body: str, *, wide: bool = False) -> str:
    """A whole document around `body` (HTML). `wide` uses the full window."""
    return _FRAME.format(
        title=escape(title),
        style=asset("page.css"),
        wide=' class="wide"' if wide else "",
        body=body,
    )


def figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def tile(value: str, words: str) -> str:
    """One large number with what it is."""
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(words)}</span></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Cells are HTML; columns in `numeric` are set flush right."""

    def row(cells: Sequence[str], tag: str) -> str:
        inner = "".join(
            f'<{tag} class="num">{cell}</{tag}>' if index in numeric else f"<{tag}>{cell}</{tag}>"
            for index, cell in enumerate(cells)
        )
        return f"<tr>{inner}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    inner = f"<thead>{row(head, 'th')}</thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>'
