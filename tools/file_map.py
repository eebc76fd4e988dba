"""Rewrite the file map in docs/architecture.md from the first line of each module's docstring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "octavo"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- file map: tools/file_map.py -->\n", "<!-- end of file map -->\n"


def file_map() -> str:
    """One line a module, one heading a folder."""
    lines = []
    folder = None
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda p: (str(p.parent), p.name)):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if docstring is None:
            continue
        if path.parent != folder:
            folder = path.parent
            lines.append(f"\n**{folder.relative_to(PACKAGE.parent)}/**\n")
        lines.append(f"- `{path.relative_to(PACKAGE.parent)}`: {docstring.splitlines()[0]}")
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """The document with the map as it should be now."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + file_map() + END + tail


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))
