"""How the demo shows several growing answers: live panels on a terminal, tagged lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.errors import ConfigError

LINE_WIDTH = 72  # characters of one answer collected before a tagged line is printed
Add = Callable[[int, str, bool], None]
"""Appends text to the answer of that index; True: it is the last of it."""


@contextmanager
def show_lines(questions: Sequence[str]) -> Iterator[Add]:
    """Prints `[k] text` whenever answer k has a line's worth of new text, or ends."""
    pending = [""] * len(questions)

    def add(index: int, piece: str, finished: bool) -> None:
        lines = (pending[index] + piece).split("\n")
        if finished or len(lines[-1]) >= LINE_WIDTH:
            lines.append("")
        pending[index] = lines.pop()
        for line in lines:
            if line.strip():
                print(f"[{index + 1}] {line}", flush=True)

    for index, question in enumerate(questions):
        print(f"[{index + 1}] > {question}")
    print(flush=True)
    try:
        yield add
    finally:
        print()


@contextmanager
def show_panels(questions: Sequence[str]) -> Iterator[Add]:
    """One panel an answer, redrawn in place. Needs the `demo` extra."""
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.panel import Panel
        from rich.text import Text
    except ImportError:
        raise ConfigError("the demo's panels need rich: pip install 'octavo[demo]'") from None
    answers = [""] * len(questions)
    colours = ["cyan"] * len(questions)

    def add(index: int, piece: str, finished: bool) -> None:
        answers[index] += piece
        colours[index] = "green" if finished else "cyan"

    def render() -> Group:
        each = zip(questions, answers, colours, strict=True)
        return Group(
            *(Panel(Text(a.strip()), title=Text(q), border_style=colour) for q, a, colour in each)
        )

    with Live(refresh_per_second=12, get_renderable=render):
        yield add
