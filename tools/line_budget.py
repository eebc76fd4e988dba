"""Print lines per layer and the largest files, against the budget."""

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
        lines[relative.parts[0].removesuffix(".py")] += count
        files.append((count, str(relative)))
    for part, count in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{part:<18}{count:>7}")
    print(f"{'all':<18}{sum(lines.values()):>7} of {BUDGET}")
    print("largest:", ", ".join(f"{name} {count}" for count, name in sorted(files)[:-6:-1]))


if __name__ == "__main__":
    main()
