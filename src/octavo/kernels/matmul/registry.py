"""The ladder as data: one `Rung` for each `ladder/NN_name.cu`, read from the files themselves.

A rung's header comment carries its prose, its `constexpr int` lines carry its tile sizes and launch
shape, so no number is written twice. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LADDER_DIR = Path(__file__).parent / "ladder"
HEADER_FIELDS = ("Problem", "Idea", "Limiter", "Predicted", "Measured", "PTX")

_CONSTANT = re.compile(r"^constexpr int ([A-Z][A-Z0-9_]*) = ([^;]+);", re.MULTILINE)
_ENTRY = re.compile(r"extern \"C\" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # C++ integer division of non-negative numbers
}


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    `dtype` "fp32": C[M,N] = A[M,K] B[K,N]; "bf16": C[M,N] = A[M,K] B[N,K]^T, both row-major.
    `kind` is "matmul", or "ilp" for rung 00, which multiplies nothing and only times FMA chains.
    `block_*` are the output tile and K step of one CTA, `threads` its size, `dynamic_smem` bytes.
    `persistent`: the grid is the number of SMs, otherwise one CTA a tile. `cluster` is in CTAs, of
    which `cluster_n` lie side by side and the rest below each other.
    `header` has the prose by field: Problem, Idea, Limiter, Predicted, Measured, PTX.
    """

    number: int
    name: str
    title: str
    dtype: str
    kind: str
    path: Path
    entry: str
    block_m: int
    block_n: int
    block_k: int
    threads: int
    stages: int
    dynamic_smem: int
    cluster: int
    cluster_n: int
    persistent: bool
    header: Mapping[str, str] = field(compare=False)
    constants: Mapping[str, int] = field(repr=False, compare=False)

    @property
    def source(self) -> str:
        return self.path.read_text()

    @property
    def idea(self) -> str:
        return self.header["Idea"]

    @property
    def limiter(self) -> str:
        return self.header["Limiter"]


def parse_constants(source: str) -> dict[str, int]:
    """The `constexpr int NAME = expression;` lines; an expression may use earlier names."""
    values: dict[str, int] = {}

    def evaluate(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return values[node.id]
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right)))
        raise ValueError(f"not an integer expression: {ast.dump(node)}")

    for name, text in _CONSTANT.findall(source):
        values[name] = evaluate(ast.parse(text.strip(), mode="eval").body)
    return values


def parse_header(source: str) -> tuple[str, dict[str, str]]:
    """The title and the prose fields of the `//` block that opens a rung."""
    lines: list[str] = []
    for line in source.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].strip())
    title = lines[0].split(" ", 1)[1]
    fields: dict[str, str] = {}
    current = ""
    for line in lines[1:]:
        name, colon, rest = line.partition(":")
        if colon and name in HEADER_FIELDS:
            current = name
            fields[current] = rest.strip()
        elif current:
            fields[current] = f"{fields[current]} {line}".strip()
    missing = [name for name in HEADER_FIELDS if name not in fields]
    if missing:
        raise ValueError(f"{title}: header lacks {missing}")
    return title, fields


def read_rung(path: Path) -> Rung:
    """Builds the `Rung` of one source file. Raises ValueError for an incomplete header."""
    source = path.read_text()
    title, header = parse_header(source)
    constants = parse_constants(source)
    entry = _ENTRY.search(source)
    if entry is None:
        raise ValueError(f'{path.name}: no extern "C" kernel')
    number = int(path.stem.split("_", 1)[0])
    return Rung(
        number=number,
        name=path.stem,
        title=title,
        dtype="fp32" if number < 9 else "bf16",
        kind="ilp" if number == 0 else "matmul",
        path=path,
        entry=entry.group(1),
        block_m=constants.get("BLOCK_M", 0),
        block_n=constants.get("BLOCK_N", 0),
        block_k=constants.get("BLOCK_K", 1),
        threads=constants["THREADS"],
        stages=constants.get("STAGES", 1),
        dynamic_smem=constants.get("SMEM_BYTES", 0),
        cluster=constants.get("CLUSTER", 1),
        cluster_n=constants.get("CLUSTER_N", 1),
        persistent=bool(constants.get("PERSISTENT", 0)),
        header=header,
        constants=constants,
    )


RUNGS: tuple[Rung, ...] = tuple(read_rung(path) for path in sorted(LADDER_DIR.glob("*.cu")))


def rung(name: str | int) -> Rung:
    """Finds a rung by number (12) or name ("12_two_consumers"). Raises KeyError for neither."""
    for candidate in RUNGS:
        if name in (candidate.number, candidate.name) or str(name) == str(candidate.number):
            return candidate
    raise KeyError(f"no rung {name!r}; there are {[r.name for r in RUNGS]}")
