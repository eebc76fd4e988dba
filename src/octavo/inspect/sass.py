"""Owns machine code as data: runs nvdisasm on a CUBIN (no GPU needed) and parses what it prints.

The disassembler comes from the nvidia-cuda-nvdisasm wheel. Two runs give, for each instruction, the
source line it was made from (with -lineinfo) and the line of the PTX in between.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from octavo.errors import KernelError
from octavo.inspect.opcodes import group_of

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L\S+):$")
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_LOCATION = re.compile(r'^\s*//## File "([^"]+)", line (\d+)( inlined at)?')
_TARGET = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True)
class Location:
    """A line of a source file, as the compiler names it."""

    file: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction. `offset` in bytes from the kernel's start; `guard` is "" or "!P0".

    `where` is the line that wrote it, `called_from` the lines it was inlined into, innermost first;
    `ptx_line` counts from 1 in the PTX text. Without -lineinfo these are None and empty.
    """

    offset: int
    guard: str
    opcode: str
    operands: str
    target: str | None = None
    where: Location | None = None
    called_from: tuple[Location, ...] = ()
    ptx_line: int | None = None

    @property
    def root(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def group(self) -> str:
        return group_of(self.root, self.opcode)

    @property
    def text(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()

    def locations(self) -> tuple[Location, ...]:
        return (self.where, *self.called_from) if self.where else ()


@dataclass
class SassKernel:
    """One kernel's instructions in order, and where its labels point."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def index_of(self, label: str) -> int | None:
        """Index of the instruction at a label; None if the label is past the end."""
        return self._index_by_offset.get(self.labels.get(label, -1))

    @cached_property
    def _index_by_offset(self) -> dict[int, int]:
        return {step.offset: index for index, step in enumerate(self.instructions)}

    def count(self, prefix: str) -> int:
        """Instructions whose opcode starts with `prefix`; "LDG.E" counts LDG.E.64, not LDGSTS.E."""
        return sum(matches(i.opcode, prefix) for i in self.instructions)

    def opcodes(self) -> Counter[str]:
        return Counter(i.opcode for i in self.instructions)


def matches(opcode: str, prefix: str) -> bool:
    return opcode == prefix or opcode.startswith(prefix + ".")


def find_tool(name: str) -> Path:
    """Path of "nvdisasm" or "cuobjdump" in NVIDIA's wheels. Raises KernelError if missing."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            if path.is_file():
                return path
    raise KernelError(f"{name} is missing: install octavo[dev] (the nvidia-cuda-{name} wheel)")


def disassemble(cubin: bytes) -> dict[str, SassKernel]:
    """All kernels of a CUBIN by name. Raises KernelError without nvdisasm or for a broken CUBIN."""
    tool = find_tool("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        by_source = _run(tool, "-c", "-gi", file.name)
        by_ptx = _run(tool, "-c", "-gp", file.name)
    return parse_sass(by_source, by_ptx)


def _run(tool: Path, *arguments: str) -> str:
    found = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=120)
    if found.returncode:
        raise KernelError(f"{tool.name} failed: {found.stderr.strip() or found.stdout.strip()}")
    return found.stdout


def parse_sass(listing: str, ptx_listing: str = "") -> dict[str, SassKernel]:
    """Parses `nvdisasm -c -gi` output, and takes the PTX lines from a `-gp` listing of the same."""
    ptx_lines = {
        (name, i.offset): i.where.line
        for name, kernel in _parse(ptx_listing).items()
        for i in kernel.instructions
        if i.where
    }
    kernels = _parse(listing)
    for name, kernel in kernels.items():
        kernel.instructions = [
            _with_ptx(i, ptx_lines.get((name, i.offset))) for i in kernel.instructions
        ]
    return kernels


def _with_ptx(instruction: Instruction, line: int | None) -> Instruction:
    if line is None:
        return instruction
    return replace(instruction, ptx_line=line)


def _parse(listing: str) -> dict[str, SassKernel]:
    kernels: dict[str, SassKernel] = {}
    current: SassKernel | None = None
    waiting: list[str] = []
    chain: list[Location] = []
    chain_open = False
    for line in listing.splitlines():
        if function := _FUNCTION.match(line):
            current = kernels.setdefault(function.group(1), SassKernel(function.group(1)))
            waiting, chain = [], []
        elif current is None:
            continue
        elif label := _LABEL.match(line):
            waiting.append(label.group(1))
        elif location := _LOCATION.match(line):
            # "inlined at" lines follow the line they continue, innermost first.
            chain = chain if chain_open else []
            chain.append(Location(location.group(1), int(location.group(2))))
            chain_open = location.group(3) is not None
        elif found := _INSTRUCTION.match(line):
            offset, guard, opcode, operands = found.groups()
            current.labels.update(dict.fromkeys(waiting, int(offset, 16)))
            waiting, chain_open = [], False
            target = _TARGET.search(operands)
            current.instructions.append(
                Instruction(
                    int(offset, 16),
                    guard or "",
                    opcode,
                    operands,
                    target.group(1) if target else None,
                    chain[0] if chain else None,
                    tuple(chain[1:]),
                )
            )
    return kernels
