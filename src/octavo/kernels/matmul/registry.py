"""The ladder as data: one `Rung` for each `ladder/NN_name.cu`, read from the files themselves.

A rung's header comment carries its prose, its `constexpr int` lines carry its tile sizes and launch
shape, so no number is written twice. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from octavo.errors import KernelError

LADDER_DIR = Path(__file__).parent / "ladder"
HEADER_FIELDS = ("Problem", "Idea", "Limiter", "Predicted", "Measured", "PTX")

_COMMENT = re.compile(r"(//.*\n)+")
_FIELD = re.compile(rf"^ ?({'|'.join(HEADER_FIELDS)}):", re.MULTILINE)
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
    which lie below each other.
    `header` has the prose by field: Problem, Idea, Limiter, Predicted, Measured, PTX.
    """

    number: int
    name: str
    title: str
    path: Path
    entry: str
    header: Mapping[str, str] = field(compare=False)
    constants: Mapping[str, int] = field(repr=False, compare=False)
    threads: int
    block_m: int = 0
    block_n: int = 0
    block_k: int = 1
    stages: int = 1
    cluster: int = 1
    persistent: int = 0

    @property
    def dynamic_smem(self) -> int:
        return self.constants.get("SMEM_BYTES", 0)

    @property
    def dtype(self) -> str:
        return "fp32" if self.number < 9 else "bf16"

    @property
    def kind(self) -> str:
        return "ilp" if self.number == 0 else "matmul"

    @property
    def source(self) -> str:
        return self.path.read_text("utf-8")


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


def read_rung(path: Path) -> Rung:
    """Builds the `Rung` of one source file. Raises ValueError for an incomplete header."""
    source = path.read_text("utf-8")
    constants = parse_constants(source)
    entry, comment = _ENTRY.search(source), _COMMENT.match(source)
    if entry is None or comment is None:
        raise ValueError(f'{path.name}: no extern "C" kernel under a header')
    title, *parts = _FIELD.split(comment[0].replace("\n//", "\n"))
    texts = (" ".join(part.split()) for part in parts[1::2])
    header = dict(zip(parts[::2], texts, strict=True))
    if missing := set(HEADER_FIELDS) - header.keys():
        raise ValueError(f"{path.name}: header lacks {missing}")
    names = {one.name for one in fields(Rung)}
    shape = {key: value for name, value in constants.items() if (key := name.lower()) in names}
    _, number, title = title.splitlines()[0].split(" ", 2)  # "// 02 Naive"
    return Rung(int(number), path.stem, title, path, entry[1], header, constants, **shape)


RUNGS: tuple[Rung, ...] = tuple(read_rung(path) for path in sorted(LADDER_DIR.glob("*.cu")))


def rung(name: str | int) -> Rung:
    """Finds a rung by number (2, "2", "02") or name ("02_naive"). Raises KernelError for neither."""
    wanted = int(name) if str(name).isdecimal() else name
    for candidate in RUNGS:
        if wanted in (candidate.number, candidate.name):
            return candidate
    raise KernelError(f"no rung {name!r}; `octavo kernels list` shows them")
