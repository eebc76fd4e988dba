"""Owns the terminal view of a kernel: remarks, then PTX and SASS side by side under each source line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.ptx import PtxInstruction
from octavo.inspect.sass import Instruction

_LEFT = 62  # columns of the PTX side


def render_text(
    assembly: Assembly, remarks: Sequence[Note], *, most: int = 6, width: int = 132
) -> str:
    """The whole report. At most `most` SASS instructions are shown for one of PTX; 0 shows all."""
    lines = [f"{assembly.name}: {len(assembly.sass.instructions)} SASS instructions", ""]
    lines += note_lines(remarks, width)
    lines += ["", f"{'source line / PTX':{_LEFT}} SASS", "-" * width]
    lines += _listing(assembly, most, width)
    return "\n".join(lines) + "\n"


def note_lines(remarks: Sequence[Note], width: int = 100) -> list[str]:
    """The remarks under their headings, wrapped, with where to look."""
    lines: list[str] = []
    heading = ""
    for note in remarks:
        if note.kind != heading:
            heading = note.kind
            lines.append(f"{heading}")
        text = note.text + _where(note)
        lines += textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _where(note: Note) -> str:
    parts = []
    if note.lines:
        parts.append("line " + ", ".join(map(str, note.lines[:4])))
    if len(note.ptx_lines) == 2:
        parts.append(f"PTX {note.ptx_lines[0]}-{note.ptx_lines[1]}")
    return f" [{'; '.join(parts)}]" if parts else ""


def _listing(assembly: Assembly, most: int, width: int) -> list[str]:
    ptx: dict[int, list[PtxInstruction]] = {}
    for step in assembly.ptx.instructions:
        ptx.setdefault(assembly.home_line(step) or 0, []).append(step)
    sass: dict[int, list[Instruction]] = {}
    for machine in assembly.sass.instructions:
        sass.setdefault(machine.ptx_line or 0, []).append(machine)
    known = {step.line for step in assembly.ptx.instructions}
    lines: list[str] = []
    source = assembly.files.get(assembly.main, {})
    for number in sorted(ptx):
        text = source.get(number, "").rstrip() if number else "(no source line)"
        lines += ["", f"{number:4d} | {text}" if number else text]
        for step in ptx[number]:
            lines += _pair(step, sass.get(step.line, []), most, width)
    rest = [s for line, steps in sass.items() if line not in known for s in steps]
    if rest:
        lines += ["", "(machine code of no PTX instruction: padding, or labels and declarations)"]
        lines += [_right(s, width) for s in (rest if not most else rest[: 2 * most])]
    return lines


def _pair(step: PtxInstruction, machine: list[Instruction], most: int, width: int) -> list[str]:
    shown = machine if not most else machine[:most]
    right = [_machine(s) for s in shown]
    if len(shown) < len(machine):
        right.append(f"      ... and {len(machine) - len(shown)} more")
    left = f"  {step.line:5d}  {short_operands(step.text)}"
    rows = []
    for index in range(max(1, len(right))):
        start = left if index == 0 else ""
        end = right[index] if index < len(right) else ""
        rows.append(f"{_cut(start, _LEFT - 1):{_LEFT}} {_cut(end, width - _LEFT - 1)}".rstrip())
    return rows


def _right(step: Instruction, width: int) -> str:
    return f"{'':{_LEFT}} {_cut(_machine(step), width - _LEFT - 1)}"


def _machine(step: Instruction) -> str:
    return f"{step.offset:04x}  {step.text}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def short_operands(text: str) -> str:
    """Leave out the middle of a long register list, as wgmma has."""
    start, end = text.find("{"), text.find("}")
    if start < 0 or end - start < 60:
        return text
    names = text[start + 1 : end].split(",")
    return f"{text[:start]}{{{names[0].strip()}, ... {len(names)} registers}}{text[end + 1 :]}"
