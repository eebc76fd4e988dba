"""Print lines per layer and the largest files, against the budgets.

Kernel sources do not count: CUDA C++ is not Python, and the functions under @triton.jit come off the
total, though not what stands around them. The plain count is printed, too.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "octavo"
BUDGET = 20_000


def kernel_lines(path: Path) -> int:
    """Lines of a file's functions under @triton.jit."""
    return sum(
        (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
    )


def main() -> None:
    """Print the table."""
    lines: Counter[str] = Counter()
    files: list[tuple[int, str]] = []
    kernels = 0
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        count = len(path.read_text().splitlines())
        lines[relative.parts[0].removesuffix(".py")] += count
        kernels += kernel_lines(path)
        files.append((count, str(relative)))
    for part, count in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{part:<18}{count:>7}")
    total = sum(lines.values())
    print(f"{'all lines':<18}{total:>7}")
    print(f"{'without kernels':<18}{total - kernels:>7} of {BUDGET}")
    print("largest:", ", ".join(f"{name} {count}" for count, name in sorted(files)[:-6:-1]))


if __name__ == "__main__":
    main()
