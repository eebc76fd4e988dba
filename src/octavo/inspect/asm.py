"""Owns one kernel seen three ways at once: source lines, PTX and SASS, and how they correspond.

`assemble` compiles and disassembles without a GPU. `notes` reads the result and says in words what
the compiler did; `asm_views` shows it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.errors import KernelError
from octavo.inspect.flow import Loop, loops
from octavo.inspect.page import words
from octavo.inspect.sass import SassKernel, Step, disassemble, parse_ptx
from octavo.kernels.jit import KernelResources, compile_source

_LINE_MARK = re.compile(r'^#line (\d+) "([^"]+)"\n', re.MULTILINE)


@dataclass
class Assembly:
    """One kernel. `files` holds the text by file and line; `main` is the file of the kernel itself.

    PTX line n is `ptx_lines[n - 1]`. SASS instructions carry their source and PTX lines.
    """

    name: str
    main: str
    files: dict[str, dict[int, str]]
    ptx_lines: list[str]
    ptx: list[Step]
    sass: SassKernel
    resources: KernelResources
    log: str = ""  # what the compiler said

    @cached_property
    def sass_loops(self) -> list[Loop]:
        return loops(self.sass)

    @cached_property
    def looped(self) -> frozenset[Step]:
        """SASS instructions that stand in any loop."""
        indices = frozenset[int]().union(*(loop.body for loop in self.sass_loops))
        return frozenset(self.sass.instructions[index] for index in indices)

    def note(
        self,
        kind: str,
        macro: str,
        at: Sequence[Step] = (),
        *,
        lines: tuple[int, ...] | None = None,
        ptx_lines: tuple[int, ...] = (),
        **facts: Any,
    ) -> Note:
        """A remark on the SASS instructions `at`, in the words of a macro of remarks.txt.

        `lines` are by default the source lines that those are of.
        """
        if lines is None:
            lines = tuple(sorted({line for step in at if (line := self.home_line(step))}))
        text = words(macro, **facts)
        return Note(kind, text, lines, ptx_lines, tuple(step.at for step in at))

    def home_line(self, step: Step) -> int | None:
        """The line of the kernel's own file that a step belongs to, through inlined calls."""
        return next((w.line for w in step.locations if w.file == self.main), None)


def assemble(source: str, name: str, kernel: str | None = None) -> Assembly:
    """Compile and disassemble `source`; `name` is the file name it appears under ("02_naive.cu").

    `kernel` picks one of several entry functions, default the first. Raises KernelError when the
    source does not compile, or when NVRTC or nvdisasm is missing.
    """
    built = compile_source(source, extra_flags=("-lineinfo",), name=name)
    machine = disassemble(built.cubin)
    entry = kernel or next(iter([*built.resources, *machine]), "")
    if entry not in machine:
        wanted = f"kernel {kernel!r}, only {', '.join(machine)}" if machine else "kernel"
        raise KernelError(f"{name} has no {wanted}")
    return from_listings(built.source, built.ptx, machine[entry], built.resources[entry], built.log)


def from_listings(
    source: str, ptx: str, sass: SassKernel, resources: KernelResources, log: str = ""
) -> Assembly:
    """The same from texts at hand; `source` has `#line` marks where files begin."""
    files = split_files(source)
    parsed = parse_ptx(ptx).get(sass.name, [])
    homes = [step.locations[-1].file for step in sass.instructions if step.locations]
    main = next(iter([*homes, *files]), "")
    return Assembly(sass.name, main, files, ptx.splitlines(), parsed, sass, resources, log)


def split_files(source: str) -> dict[str, dict[int, str]]:
    """Undo the inlining of headers: text by file and line, from the `#line` marks."""
    files: dict[str, dict[int, str]] = {}
    parts = ["1", "kernel.cu", *_LINE_MARK.split(source)]
    for number, file, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if text:
            files.setdefault(file, {}).update(enumerate(text.splitlines(), int(number)))
    return files


@dataclass(frozen=True)
class Note:
    """One remark on what the compiler did, in plain words.

    `kind` is a short heading. `lines` are source lines of the main file, `ptx_lines` lines of the
    PTX text, `offsets` SASS offsets in bytes: where to look.
    """

    kind: str
    text: str
    lines: tuple[int, ...] = ()
    ptx_lines: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
