"""Print lines per layer and the largest files, against the budgets.

Kernel sources do not count: CUDA C++ is not Python, and kernels/triton stands on a line of its own.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "octavo"
BUDGET = 20_000


def main() -> None:
    """Print the table."""
    lines: Counter[str] = Counter()
    files: list[tuple[int, str]] = []
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        count = len(path.read_text().splitlines())
        kernel = relative.parts[:2] == ("kernels", "triton")
        lines["(triton)" if kernel else relative.parts[0].removesuffix(".py")] += count
        files.append((count, str(relative)))
    for part, count in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{part:<18}{count:>7}")
    total = sum(lines.values()) - lines["(triton)"]
    print(f"{'total':<18}{total:>7} of {BUDGET}, without the kernel sources in (triton)")
    print("largest:", ", ".join(f"{name} {count}" for count, name in sorted(files)[:-6:-1]))


if __name__ == "__main__":
    main()
