"""Owns the terminal view of a kernel: remarks, then PTX and SASS side by side under each source line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby, zip_longest

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.listing import Step

_LEFT, _WIDTH = 62, 132  # columns of the PTX side, and of both


def render_text(assembly: Assembly, remarks: Sequence[Note], *, most: int = 6) -> str:
    """The whole report. At most `most` SASS instructions are shown for one of PTX; 0 shows all."""
    lines = [f"{assembly.name}: {len(assembly.sass.instructions)} SASS instructions", ""]
    lines += note_lines(remarks, _WIDTH)
    lines += ["", f"{'source line / PTX':{_LEFT}} SASS", "-" * _WIDTH]
    lines += _listing(assembly, most)
    return "\n".join(lines) + "\n"


def note_lines(remarks: Sequence[Note], width: int = 100) -> list[str]:
    """The remarks under their headings, wrapped, with where to look."""
    lines: list[str] = []
    for heading, group in groupby(remarks, lambda note: note.kind):
        lines.append(heading)
        for note in group:
            where = []
            if note.lines:
                where.append("line " + ", ".join(map(str, note.lines[:4])))
            if len(note.ptx_lines) == 2:
                where.append(f"PTX {note.ptx_lines[0]}-{note.ptx_lines[1]}")
            text = note.text + (f" [{'; '.join(where)}]" if where else "")
            lines += textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _listing(assembly: Assembly, most: int) -> list[str]:
    ptx: dict[int, list[Step]] = {}
    for step in assembly.ptx:
        ptx.setdefault(assembly.home_line(step) or 0, []).append(step)
    sass: dict[int, list[Step]] = {}
    for step in assembly.sass.instructions:
        sass.setdefault(step.ptx_line or 0, []).append(step)
    lines: list[str] = []
    source = assembly.files.get(assembly.main, {})
    for number in sorted(ptx):
        text = f"{number:4d} | {source.get(number, '').rstrip()}"
        lines += ["", text if number else "(no source line)"]
        for step in ptx[number]:
            left = f"  {step.at:5d}  {short_operands(step.text)}"
            lines += _pair(left, sass.pop(step.at, []), most)
    if rest := [step for steps in sass.values() for step in steps]:
        lines += ["", "(machine code of no PTX instruction: padding, or labels and declarations)"]
        lines += _pair("", rest, 2 * most)
    return lines


def _pair(left: str, machine: list[Step], most: int) -> list[str]:
    right = [f"{step.at:04x}  {step.text}" for step in machine]
    if most and len(right) > most:
        right[most:] = [f"      ... and {len(right) - most} more"]
    rows = zip_longest([left], right, fillvalue="")
    return [f"{_cut(a, _LEFT - 1):{_LEFT}} {_cut(b, _WIDTH - _LEFT - 1)}".rstrip() for a, b in rows]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def short_operands(text: str) -> str:
    """Leave out the middle of a long register list, as wgmma has."""
    start, end = text.find("{"), text.find("}")
    if start < 0 or end - start < 60:
        return text
    names = text[start + 1 : end].split(",")
    return f"{text[:start]}{{{names[0].strip()}, ... {len(names)} registers}}{text[end + 1 :]}"
