"""Owns the terminal view of a kernel: remarks, then PTX and SASS side by side under each source line."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.sass import Step

_LEFT, _WIDTH = 62, 132  # columns of the PTX side, and of both


def render_text(assembly: Assembly, remarks: Sequence[Note], *, most: int = 6) -> str:
    """The whole report. At most `most` SASS instructions are shown for one of PTX; 0 shows all."""
    lines = [f"{assembly.name}: {len(assembly.sass.instructions)} SASS instructions", ""]
    lines += note_lines(remarks, _WIDTH)
    lines += ["", f"{'source line / PTX':{_LEFT}} SASS", "-" * _WIDTH, *_listing(assembly, most)]
    return "\n".join(lines) + "\n"


def note_lines(remarks: Sequence[Note], width: int = 100) -> list[str]:
    """The remarks under their headings, wrapped, with where to look."""
    lines: list[str] = []
    for heading, group in groupby(remarks, lambda note: note.kind):
        lines.append(heading)
        for note in group:
            where = ["line " + ", ".join(map(str, note.lines[:4]))] if note.lines else []
            where += ["PTX " + "-".join(map(str, note.ptx_lines))] if note.ptx_lines else []
            text = note.text + (f" [{'; '.join(where)}]" if where else "")
            lines += textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _listing(assembly: Assembly, most: int) -> Iterator[str]:
    ptx: defaultdict[int, list[Step]] = defaultdict(list)
    for step in assembly.ptx:
        ptx[assembly.home_line(step) or 0].append(step)
    sass: defaultdict[int, list[Step]] = defaultdict(list)
    for step in assembly.sass.instructions:
        sass[step.ptx_line or 0].append(step)
    source = assembly.files.get(assembly.main, {}) | {0: ""}
    for number in sorted(ptx):
        yield ""
        yield f"{number:4d} | {source[number].rstrip()}" if number else "(no source line)"
        for step in ptx[number]:
            left = f"  {step.at:5d}  {short_operands(step.text)}"
            yield from _pair(left, sass.pop(step.at, []), most)
    if rest := [step for steps in sass.values() for step in steps]:
        yield from ["", "(machine code of no PTX instruction: padding, or labels and declarations)"]
        yield from _pair("", rest, 2 * most)


def _pair(left: str, machine: list[Step], most: int) -> Iterator[str]:
    right = [f"{step.at:04x}  {step.text}" for step in machine]
    if most and len(right) > most:
        right[most:] = [f"      ... and {len(right) - most} more"]
    for a, b in zip_longest([left], right, fillvalue=""):
        yield f"{_cut(a, _LEFT - 1):{_LEFT}} {_cut(b, _WIDTH - _LEFT - 1)}".rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def short_operands(text: str) -> str:
    """Leave out the middle of a long register list, as wgmma has."""

    def short(found: re.Match[str]) -> str:
        names = found[1].split(",")
        return f"{{{names[0].strip()}, ... {len(names)} registers}}"

    return re.sub(r"\{([^}]{60,})\}", short, text, count=1)
