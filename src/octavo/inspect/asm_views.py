"""Owns the two views of a kernel: text for a terminal, and a page with three linked panes.

Both show the remarks first. The text has PTX and SASS side by side under each source line.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Any

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.page import render
from octavo.inspect.sass import GROUP_ORDER, Step

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


def render_html(
    assembly: Assembly, remarks: Sequence[Note], *, title: str = "", intro: str = ""
) -> str:
    """One self-contained page. `intro` is plain text under the title: what the kernel is about."""
    steps = [step for step in assembly.sass.instructions if step.root != "NOP"]
    counts = Counter(step.group for step in steps)
    used = {assembly.home_line(step) for step in assembly.sass.instructions}
    source = sorted(assembly.files.get(assembly.main, {}).items())
    return render(
        "asm.html",
        title=title or assembly.name,
        intro=intro,
        mix=[(name, _class(name), counts[name]) for name in GROUP_ORDER if counts[name]],
        notes=[(note, _note_places(note)) for note in remarks],
        words={step.root: step.words for step in steps},
        source=[_row(number, number if number in used else None, text) for number, text in source],
        ptx=_ptx(assembly),
        sass=_sass(assembly),
    )


def _class(group: str) -> str:
    return group.split()[0].lower()


def _note_places(note: Note) -> dict[str, str]:
    offsets = [f"{offset:x}" for offset in note.offsets]
    places = {"lines": note.lines, "ptx": note.ptx_lines, "offsets": offsets}
    return {f"data-{key}": ",".join(map(str, found)) for key, found in places.items() if found}


def _row(number: int | str, line: int | None, text: str, **links: Any) -> dict[str, Any]:
    """A line of code as asm.html takes it. Equal source line `s`, PTX line `p` and SASS offset `o`
    tie it to rows of other panes."""
    places = {f"data-{key}": link for key, link in {"s": line, **links}.items()}
    return {"number": number, "line": line, "text": text, "places": places}


def _ptx(assembly: Assembly) -> Iterator[str | dict[str, Any]]:
    steps = {s.at: s for s in assembly.ptx}
    for number in range(min(steps, default=0), max(steps, default=-1) + 1):
        if step := steps.get(number):
            yield _row(number, assembly.home_line(step), short_operands(step.text), p=number)
        elif (text := assembly.ptx_lines[number - 1].strip()).endswith(":"):
            yield text


def _sass(assembly: Assembly) -> Iterator[str | dict[str, Any]]:
    """Labels, and instructions with a bar for each loop around them, "hot" for the innermost."""
    loops = assembly.sass_loops
    names = {index: label for label, index in assembly.sass.labels.items()}
    outer = {loop for loop in loops if any(other.body < loop.body for other in loops)}
    depth = max((loop.depth + 1 for loop in loops), default=0)
    for index, step in enumerate(assembly.sass.instructions):
        if index in names:
            yield names[index]
        around = {loop.depth: loop for loop in loops if index in loop.body}
        bars = [
            "" if d not in around else "in" if around[d] in outer else "hot" for d in range(depth)
        ]
        links = {"p": step.ptx_line, "o": f"{step.at:x}"}
        row = _row(f"{step.at:04x}", assembly.home_line(step), step.operands, **links)
        yield row | {"bars": bars, "step": step, "group": _class(step.group)}
