"""How the demo shows several growing answers: live panels on a terminal, tagged lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group

LINE_WIDTH = 72  # characters of one answer collected before a tagged line is printed


class Display(Protocol):
    """Receives the pieces of several answers."""

    def add(self, index: int, piece: str, finished: bool) -> None:
        """Append text to answer `index`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def make_display(questions: list[str]) -> Display:
    """Panels if stdout is a terminal, else lines."""
    return PanelDisplay(questions) if sys.stdout.isatty() else LineDisplay(questions)


class LineDisplay:
    """Prints `[k] text` whenever answer k has a line's worth of new text, or ends."""

    def __init__(self, questions: list[str]) -> None:
        self._pending = [""] * len(questions)
        for index, question in enumerate(questions):
            print(f"[{index + 1}] > {question}")
        print(flush=True)

    def add(self, index: int, piece: str, finished: bool) -> None:
        """Append text to answer `index`."""
        lines = (self._pending[index] + piece).split("\n")
        if finished or len(lines[-1]) >= LINE_WIDTH:
            lines.append("")
        self._pending[index] = lines.pop()
        for line in lines:
            if line.strip():
                print(f"[{index + 1}] {line}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        print()


class PanelDisplay:
    """One panel an answer, redrawn in place. Needs the `demo` extra."""

    def __init__(self, questions: list[str]) -> None:
        try:
            from rich.live import Live
        except ImportError:
            raise ConfigError("the demo's panels need rich: pip install 'octavo[demo]'") from None
        self._questions = questions
        self._answers = [""] * len(questions)
        self._done = [False] * len(questions)
        self._live = Live(refresh_per_second=12, get_renderable=self._render)

    def add(self, index: int, piece: str, finished: bool) -> None:
        """Append text to answer `index`."""
        self._answers[index] += piece
        self._done[index] = finished

    def _render(self) -> Group:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        panels = [
            Panel(
                Text(answer.strip()), title=Text(question), border_style="green" if done else "cyan"
            )
            for question, answer, done in zip(
                self._questions, self._answers, self._done, strict=True
            )
        ]
        return Group(*panels)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, traceback)
