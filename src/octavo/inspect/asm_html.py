"""Owns the HTML view of a kernel: remarks, and source, PTX and SASS in three linked panes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from html import escape

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.asm_text import short_operands
from octavo.inspect.opcodes import (
    CONTROL,
    GROUP_ORDER,
    INTEGER,
    LOAD,
    MATH,
    MOVE,
    OTHER,
    STORE,
    SYNC,
    TENSOR,
    TMA,
    words_of,
)
from octavo.inspect.page import asset, page

_CLASS = {
    MATH: "g-math",
    TENSOR: "g-tensor",
    LOAD: "g-load",
    STORE: "g-store",
    TMA: "g-tma",
    SYNC: "g-sync",
    CONTROL: "g-control",
}
_COLOUR = {
    MATH: "var(--c2)",
    TENSOR: "var(--c3)",
    LOAD: "var(--c0)",
    STORE: "var(--c1)",
    TMA: "var(--c7)",
    SYNC: "var(--c4)",
    CONTROL: "var(--c5)",
    INTEGER: "var(--soft)",
    MOVE: "var(--line)",
    OTHER: "var(--grid)",
}


def render_html(
    assembly: Assembly, remarks: Sequence[Note], *, title: str = "", intro: str = ""
) -> str:
    """One self-contained page. `intro` is plain text under the title: what the kernel is about."""
    title = title or assembly.name
    style, script = asset("asm.html").split("<script>", 1)
    body = [
        style,
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(intro)}</p>' if intro else "",
        "<p>Left: what was written. Middle: PTX, the compiler's portable intermediate code. Right: "
        "SASS, what the GPU runs. Hover a line to see where it went, click to jump there; hover an "
        "opcode for what it does. Green bars mark the innermost loops.</p>",
        _mix(assembly),
        _notes(remarks),
        '<div class="panes">',
        f'<div class="pane" id="source"><h3>Source</h3>{_source(assembly)}</div>',
        f'<div class="pane" id="ptx"><h3>PTX</h3>{_ptx(assembly)}</div>',
        f'<div class="pane" id="sass"><h3>SASS</h3>{_sass(assembly)}</div>',
        "</div>",
        _words(assembly),
        "<script>" + script,
    ]
    return page(title, "\n".join(body), wide=True)


def _words(assembly: Assembly) -> str:
    """What each opcode of this kernel does, for the tooltips that the script makes."""
    words = {s.root: words_of(s.root) for s in assembly.sass.instructions}
    data = json.dumps({root: text for root, text in sorted(words.items()) if text})
    safe = data.replace("<", "\\u003c")  # nothing in it can end the script element
    return f'<script type="application/json" id="words">{safe}</script>'


def _mix(assembly: Assembly) -> str:
    """A bar of all instructions by group, with its legend."""
    counts = Counter(s.group for s in assembly.sass.instructions if s.root != "NOP")
    total = sum(counts.values()) or 1
    groups = [g for g in GROUP_ORDER if counts[g]]
    bar = "".join(
        f'<span style="width:{100 * counts[g] / total:.2f}%;background:{_COLOUR[g]}"></span>'
        for g in groups
    )
    legend = "".join(
        f'<span><b style="color:{_COLOUR[g]}">&#9632;</b> {escape(g)} {counts[g]}</span>'
        for g in groups
    )
    return f'<div class="mix">{bar}</div><div class="legend">{legend}</div>'


def _notes(remarks: Sequence[Note]) -> str:
    return '<div class="notes">' + "".join(map(_note, remarks)) + "</div>"


def _note(note: Note) -> str:
    data = {
        "lines": [str(n) for n in note.lines],
        "ptx": [str(n) for n in note.ptx_lines],
        "offsets": [f"{o:x}" for o in note.offsets],
    }
    places = "".join(f' data-{key}="{",".join(v)}"' for key, v in data.items() if v)
    go = " go" if places else ""
    # Odd pieces between backticks are code.
    text = "".join(
        f"<code>{escape(part)}</code>" if index % 2 else escape(part)
        for index, part in enumerate(note.text.split("`"))
    )
    return f'<div class="note{go}"{places}><b>{escape(note.kind)}.</b> {text}</div>'


def _hue(line: int | None) -> str:
    # Neighbouring lines get different colours; the same line has one in all three panes.
    return f" h{line % 8}" if line else ""


def _row(number: str, code: str, line: int | None, data: str, extra: str = "") -> str:
    return f'<div class="row{_hue(line)}"{data}><i>{number}</i>{extra}<span>{code}</span></div>'


def _source(assembly: Assembly) -> str:
    used = {line for s in assembly.sass.instructions if (line := assembly.home_line(s))}
    rows = []
    for number, text in sorted(assembly.files.get(assembly.main, {}).items()):
        line = number if number in used else None
        data = f' data-s="{number}"' if line else ""
        rows.append(_row(str(number), escape(text) or " ", line, data))
    return "".join(rows)


def _ptx(assembly: Assembly) -> str:
    steps = {s.line: s for s in assembly.ptx.instructions}
    if not steps:
        return ""
    rows = []
    for number in range(min(steps), max(steps) + 1):
        step = steps.get(number)
        if step is None:
            text = assembly.ptx_lines[number - 1].strip()
            if text.endswith(":"):
                rows.append(f'<div class="label">{escape(text)}</div>')
            continue
        line = assembly.home_line(step)
        data = f' data-p="{number}"' + (f' data-s="{line}"' if line else "")
        rows.append(_row(str(number), escape(short_operands(step.text)), line, data))
    return "".join(rows)


def _sass(assembly: Assembly) -> str:
    names = {offset: label for label, offset in assembly.sass.labels.items()}
    deepest = max((x.depth for x in assembly.sass_loops), default=-1) + 1
    inner = {
        x for x in assembly.sass_loops if not any(y.body < x.body for y in assembly.sass_loops)
    }
    rows = []
    for index, step in enumerate(assembly.sass.instructions):
        if step.offset in names:
            rows.append(f'<div class="label">{escape(names[step.offset])}</div>')
        bars = ["<b></b>"] * deepest
        for loop in assembly.sass_loops:
            if index in loop:
                bars[loop.depth] = f'<b class="{"hot" if loop in inner else "in"}"></b>'
        line = assembly.home_line(step)
        data = f' data-o="{step.offset:x}"'
        data += f' data-p="{step.ptx_line}"' if step.ptx_line else ""
        data += f' data-s="{line}"' if line else ""
        guard = f"@{step.guard} " if step.guard else ""
        kind = _CLASS.get(step.group, "")
        opcode = f'<em class="{kind}">{escape(step.opcode)}</em>' if kind else escape(step.opcode)
        code = f"{guard}{opcode} {escape(step.operands)}"
        extra = f'<span class="loops">{"".join(bars)}</span>'
        rows.append(_row(f"{step.offset:04x}", code, line, data, extra))
    return "".join(rows)
