"""Owns machine code as data: reads PTX, runs nvdisasm on a CUBIN (no GPU needed) and reads its SASS.

PTX is what the compiler's front end wrote: unrolling and inlining are visible there, registers are
still unlimited, and instructions are not yet scheduled. ptxas then makes SASS of it. The disassembler
comes from the nvidia-cuda-nvdisasm wheel. It says for each instruction the source line that it was
made from (with -lineinfo) and the line of the PTX in between. opcodes.txt says in words what each
SASS opcode is, and the group it is counted under.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from octavo.errors import KernelError

MATH, TENSOR, MOVE, OTHER = "math", "tensor core", "move", "other"
GROUP_ORDER = (TENSOR, MATH, *["load", "store", "TMA", "sync", "address"], MOVE, "control", OTHER)
_TABLE = [
    [cell.strip() for cell in line.split("|")]
    for line in (Path(__file__).parent / "opcodes.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]
_KNOWN = {root: (group, words) for group, roots, words in _TABLE for root in roots.split()}
_UNIFORM = "; on the uniform datapath (once a warp)"
_KNOWN = {f"U{root}": (group, words + _UNIFORM) for root, (group, words) in _KNOWN.items()} | _KNOWN
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_PTX_ENTRY = re.compile(r"\.entry\s+(\w+)")
_PTX_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_PTX_INSTRUCTION = re.compile(r"(?:^|[;{}:])\s*(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*([^;]*?)\s*(?=;)")
_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L\S+):$")
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_LOCATION = re.compile(r'^\s*//## File "([^"]+)", line (\d+)( inlined at)?')
_TARGET = re.compile(r"`\((\.L\w+)\)")


class Location(NamedTuple):
    """A line of a source file, as the compiler names it."""

    file: str
    line: int


@dataclass(frozen=True)
class Step:
    """One instruction. `at` is a SASS offset in bytes, or a line of the PTX text, counted from 1.

    `guard` is "" or "!P0". `locations` are the line that wrote it and those it was inlined into,
    innermost first; empty without -lineinfo. SASS only: `ptx_line` is the line of the PTX text that
    it was made of, `target` the index that it branches to.
    """

    at: int
    guard: str
    opcode: str
    operands: str
    locations: tuple[Location, ...] = ()
    ptx_line: int | None = None
    target: int | None = None

    @property
    def root(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def names(self) -> list[str]:
        """The operands one by one."""
        return [name.strip().removesuffix(".reuse") for name in self.operands.split(",")]

    @property
    def text(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()

    @property
    def group(self) -> str:
        """One of GROUP_ORDER, under which it is counted; unknown opcodes are "other"."""
        is_move = self.opcode.startswith(("IMAD.MOV", "HFMA2.MMA"))
        return MOVE if is_move else _KNOWN.get(self.root, (OTHER, ""))[0]

    @property
    def words(self) -> str:
        """What the opcode does, or an empty text for one we do not know."""
        return _KNOWN.get(self.root, (OTHER, ""))[1]

    def starts(self, prefix: str) -> bool:
        """Whether the opcode is `prefix` or goes on after a dot: "LDG" fits LDG.E, not LDGSTS."""
        return f"{self.opcode}.".startswith(f"{prefix}.")


@dataclass
class SassKernel:
    """One kernel's instructions in order; `labels` maps a label to the index that it stands before."""

    name: str
    instructions: list[Step] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def count(self, prefix: str) -> int:
        """Instructions whose opcode starts with `prefix`; "LDG.E" counts LDG.E.64, not LDGSTS.E."""
        return sum(step.starts(prefix) for step in self.instructions)

    def opcodes(self) -> Counter[str]:
        return Counter(step.opcode for step in self.instructions)


def find_tool(name: str) -> Path:
    """Path of "nvdisasm", say, in NVIDIA's wheels. Raises KernelError if missing."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            if path.is_file():
                return path
    raise KernelError(f"{name} is missing: pip install -e '.[kernels]' (nvidia-cuda-{name})")


def disassemble(cubin: bytes) -> dict[str, SassKernel]:
    """All kernels of a CUBIN by name. Raises KernelError without nvdisasm or for a broken CUBIN."""
    tool = find_tool("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", "-gi", "-gp", file.name]
        found = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    if found.returncode:
        raise KernelError(f"{tool.name} failed: {found.stderr.strip() or found.stdout.strip()}")
    return parse_sass(found.stdout)


def parse_sass(listing: str) -> dict[str, SassKernel]:
    """Parses `nvdisasm -c -gi -gp` output: all kernels by name."""
    kernels: dict[str, SassKernel] = {}
    kernel = SassKernel("")
    chain: tuple[Location, ...] = ()
    chain_open = False
    ptx_line: int | None = None
    for line in listing.splitlines():
        if function := _FUNCTION.match(line):
            kernel = kernels.setdefault(function.group(1), SassKernel(function.group(1)))
            chain, ptx_line = (), None
        elif label := _LABEL.match(line):
            kernel.labels[label.group(1)] = len(kernel.instructions)
        elif location := _LOCATION.match(line):
            where = Location(location.group(1), int(location.group(2)))
            if where.file == ".nv_debug_ptx_txt":
                ptx_line = where.line
                continue
            # "inlined at" lines follow the line they continue, innermost first.
            chain = (*chain, where) if chain_open else (where,)
            chain_open = location.group(3) is not None
        elif found := _INSTRUCTION.match(line):
            offset, guard, opcode, operands = found.groups(default="")
            chain_open = False
            step = Step(int(offset, 16), guard, opcode, operands, chain, ptx_line)
            kernel.instructions.append(step)
    for kernel in kernels.values():
        for index, step in enumerate(kernel.instructions):
            if found := _TARGET.search(step.operands):
                kernel.instructions[index] = replace(step, target=kernel.labels.get(found[1]))
    return kernels


def parse_ptx(text: str) -> dict[str, list[Step]]:
    """The instructions of each kernel by name. Declarations and debug sections are skipped."""
    files = dict(_PTX_FILE.findall(text))
    found: dict[str, list[Step]] = {}
    steps: list[Step] = []
    depth = 0  # of braces: a kernel's body, and blocks of inline assembly in it
    callers: dict[Location, Location | None] = {}
    chain: tuple[Location, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//", 1)[0]
        if entry := _PTX_ENTRY.search(code):
            steps, callers, chain = found.setdefault(entry.group(1), []), {}, ()
        elif loc := _PTX_LOC.match(code):
            # It names the innermost line; who called that may have been said further back.
            file, row, from_file, from_line = loc.groups(default="")
            here = Location(files.get(file, ""), int(row))
            caller = Location(files.get(from_file, ""), int(from_line)) if from_file else None
            callers[here] = caller
            chain = (here,)
            while caller and caller not in chain:
                chain += (caller,)
                caller = callers.get(caller)
        elif depth:
            for guard, opcode, operands in _PTX_INSTRUCTION.findall(code):
                steps.append(Step(number, guard, opcode, operands, chain))
        depth += code.count("{") - code.count("}")
    return found
