"""Owns PTX as data: parses NVRTC's text into kernels, instructions, labels and source lines.

PTX is what the compiler's front end wrote: unrolling and inlining are visible here, registers are
still unlimited, and instructions are not yet scheduled. ptxas then makes SASS of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from octavo.inspect.sass import Location

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(?")
_LABEL = re.compile(r"^\s*(\$?\w+):\s*(?://.*)?$")
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_INSTRUCTION = re.compile(r"^\s*(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*?)\s*;")
_BRANCH = re.compile(r"(\$?\w+)\s*$")


@dataclass(frozen=True)
class PtxInstruction:
    """One PTX instruction; `line` counts from 1 in the whole PTX text."""

    line: int
    guard: str
    opcode: str
    operands: str
    target: str | None = None
    where: Location | None = None
    called_from: tuple[Location, ...] = ()

    @property
    def root(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def text(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()

    def locations(self) -> tuple[Location, ...]:
        return (self.where, *self.called_from) if self.where else ()


@dataclass
class PtxKernel:
    """One `.entry`: instructions in order; `labels` maps a label to the index it stands before."""

    name: str
    instructions: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def add_label(self, name: str) -> None:
        """Labels of inline assembly repeat with each copy: later ones are kept as "name#2"..."""
        copies = sum(key.split("#")[0] == name for key in self.labels)
        key = f"{name}#{copies + 1}" if copies else name
        self.labels[key] = len(self.instructions)

    def settle_targets(self) -> None:
        """Point each branch at the nearest copy of its label."""
        for index, step in enumerate(self.instructions):
            copies = [k for k in self.labels if step.target and k.split("#")[0] == step.target]
            if len(copies) > 1:
                nearest = min(copies, key=lambda key: abs(self.labels[key] - index))
                self.instructions[index] = replace(step, target=nearest)

    def index_of(self, label: str) -> int | None:
        index = self.labels.get(label)
        return index if index is not None and index < len(self.instructions) else None


class _Lines:
    """Follows `.loc` directives. The last one is innermost; who called it may stand further back."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.start()

    def start(self) -> None:
        self.last: Location | None = None
        self.callers: dict[Location, Location | None] = {}

    def add(self, match: re.Match[str]) -> None:
        file, line, from_file, from_line = match.groups()
        self.last = self._location(file, line)
        self.callers[self.last] = self._location(from_file, from_line) if from_file else None

    def chain(self) -> tuple[Location | None, tuple[Location, ...]]:
        if self.last is None:
            return None, ()
        callers: list[Location] = []
        caller = self.callers[self.last]
        while caller is not None and caller not in callers:
            callers.append(caller)
            caller = self.callers.get(caller)
        return self.last, tuple(callers)

    def _location(self, file: str, line: str) -> Location:
        return Location(self.files.get(file, f"file {file}"), int(line))


def parse_ptx(text: str) -> dict[str, PtxKernel]:
    """All kernels of a PTX text, by name. Declarations and debug sections are skipped."""
    kernels: dict[str, PtxKernel] = {}
    current: PtxKernel | None = None
    lines = _Lines(dict(_FILE.findall(text)))
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//", 1)[0]
        if depth == 0 and (entry := _ENTRY.search(code)):
            current = kernels.setdefault(entry.group(1), PtxKernel(entry.group(1)))
            lines.start()
        if current is None:
            continue
        if loc := _LOC.match(code):
            lines.add(loc)
        elif depth and (label := _LABEL.match(code)):
            current.add_label(label.group(1))
        elif depth and (found := _INSTRUCTION.match(code)):
            guard, opcode, operands = found.groups()
            where, callers = lines.chain()
            branch = _BRANCH.search(operands) if opcode.startswith("bra") else None
            target = branch.group(1) if branch else None
            current.instructions.append(
                PtxInstruction(number, guard or "", opcode, operands, target, where, callers)
            )
        # wgmma's register lists and inline asm blocks open and close braces on one line or nest.
        depth += code.count("{") - code.count("}")
        if depth <= 0 and current.instructions:
            current, depth = None, 0
    for kernel in kernels.values():
        kernel.settle_targets()
    return kernels
