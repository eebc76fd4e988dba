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
_LABEL = re.compile(r"(\$?\w+):(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_INSTRUCTION = re.compile(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*?)\s*$")
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


class _Reader:
    """Builds kernels statement by statement. Braces open scopes, in which labels are local."""

    def __init__(self, files: dict[str, str]) -> None:
        self.kernels: dict[str, PtxKernel] = {}
        self.lines = _Lines(files)
        self.kernel: PtxKernel | None = None
        self.scopes: list[int] = []
        self.opened = 0
        self.branches: list[tuple[int, str, list[int]]] = []

    def enter(self, name: str) -> None:
        self.kernel = self.kernels.setdefault(name, PtxKernel(name))
        self.scopes, self.branches = [], []
        self.lines.start()

    def open(self) -> None:
        self.opened += 1
        self.scopes.append(self.opened)

    def close(self) -> None:
        if self.scopes:
            self.scopes.pop()
        if not self.scopes and self.kernel:
            self._settle(self.kernel)
            self.kernel = None

    def label(self, name: str) -> None:
        if self.kernel and self.scopes:
            self.kernel.labels[f"{name}@{self.scopes[-1]}"] = len(self.kernel.instructions)

    def statement(self, number: int, text: str) -> None:
        if self.kernel is None or not self.scopes:
            return
        if loc := _LOC.match(text):
            self.lines.add(loc)
        elif found := _INSTRUCTION.match(text):
            guard, opcode, operands = found.groups()
            where, callers = self.lines.chain()
            branch = _BRANCH.search(operands) if opcode.startswith("bra") else None
            if branch:
                index = len(self.kernel.instructions)
                self.branches.append((index, branch.group(1), list(self.scopes)))
            self.kernel.instructions.append(
                PtxInstruction(number, guard or "", opcode, operands, None, where, callers)
            )

    def _settle(self, kernel: PtxKernel) -> None:
        """Branch targets, once all labels are known: the innermost scope that has the name."""
        for index, name, scopes in self.branches:
            keys = [f"{name}@{scope}" for scope in reversed(scopes)]
            target = next((key for key in keys if key in kernel.labels), None)
            kernel.instructions[index] = replace(kernel.instructions[index], target=target)


def parse_ptx(text: str) -> dict[str, PtxKernel]:
    """All kernels of a PTX text, by name. Declarations and debug sections are skipped."""
    reader = _Reader(dict(_FILE.findall(text)))
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//", 1)[0]
        if entry := _ENTRY.search(code):
            reader.enter(entry.group(1))
            continue
        while code := code.strip():
            if code[0] in "{}":
                reader.open() if code[0] == "{" else reader.close()
                code = code[1:]
            elif label := _LABEL.match(code):
                reader.label(label.group(1))
                code = code[label.end() :]
            else:
                statement, _, code = code.partition(";")
                reader.statement(number, statement)
    return reader.kernels
