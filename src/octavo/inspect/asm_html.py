"""Owns the HTML view of a kernel: remarks, and source, PTX and SASS in three linked panes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.asm_text import short_operands
from octavo.inspect.opcodes import GROUP_ORDER, group_of, words_of
from octavo.inspect.page import render


def render_html(
    assembly: Assembly, remarks: Sequence[Note], *, title: str = "", intro: str = ""
) -> str:
    """One self-contained page. `intro` is plain text under the title: what the kernel is about."""
    steps = [step for step in assembly.sass.instructions if step.root != "NOP"]
    counts = Counter(map(group_of, steps))
    used = {assembly.home_line(step) for step in assembly.sass.instructions}
    source = sorted(assembly.files.get(assembly.main, {}).items())
    return render(
        "asm.html",
        title=title or assembly.name,
        intro=intro,
        mix=[(name, _class(name), counts[name]) for name in GROUP_ORDER if counts[name]],
        notes=[(note, _note_places(note)) for note in remarks],
        words={step.root: words_of(step.root) for step in steps},
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
        yield row | {"bars": bars, "step": step, "group": _class(group_of(step))}
