"""Text in columns, as benchmarks and commands print it."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """One line a row, cells of a column equally wide; right: all but the first column to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if right else str.ljust
    padded = ([row[0].ljust(widths[0]), *map(pad, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
