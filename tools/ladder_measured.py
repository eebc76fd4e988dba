"""Write a ladder run's figures where readers meet them: each rung's header and the table in the docs.

    python tools/ladder_measured.py benchmarks/results/ladder-h200.json COMMIT

COMMIT is the one that was measured. Run it after a run that replaces the committed JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LADDER = ROOT / "src" / "octavo" / "kernels" / "matmul" / "ladder"
DOCUMENT = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- ladder table: tools/ladder_measured.py -->\n", "<!-- end of ladder table -->\n"

Row = dict[str, Any]


def shown_rows(document: dict[str, Any]) -> dict[str, dict[int, Row]]:
    """Rung to size to row: cool runs for bf16, sustained for fp32 (whose clock does not sink)."""
    found: dict[str, dict[int, Row]] = {}
    for row in document["results"]:
        if row["mode"] == ("cool" if row["dtype"] == "bf16" else "sustained"):
            name = row["rung"] if row["rung"] != "cublas" else f"cublas {row['dtype']}"
            found.setdefault(name, {})[row["m"]] = row
    return found


def rate(row: Row) -> str:
    digits = 0 if row["tflops"] >= 100 else 1 if row["tflops"] >= 1 else 2
    return f"{row['tflops']:.{digits}f}"


def sentence(by_size: dict[int, Row], gpu: str, commit: str) -> str:
    """One header line."""
    sizes = sorted(by_size)
    rates = ", ".join(f"{rate(by_size[s])} TFLOP/s at {s}^3" for s in sizes)
    ratios = ", ".join(f"{by_size[s]['vs_cublas']:.2f}" for s in sizes)
    mode = "" if by_size[sizes[0]]["dtype"] == "fp32" else ", cool"
    return f"{rates}; {ratios} x cuBLAS{mode}; {gpu}, {commit}."


def update_header(path: Path, text: str) -> None:
    """Replaces the Measured field, however many lines it had."""
    pattern = r"^// Measured:.*\n(?://            .*\n)*"
    source = path.read_text()
    line = f"// Measured:  {text}\n"
    if len(line) > 110:
        cut = line.rfind("; ", 0, 100) + 1
        line = f"{line[:cut]}\n//            {line[cut + 1 :]}"
    updated, count = re.subn(pattern, line.replace("\\", r"\\"), source, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{path.name}: {count} Measured fields")
    path.write_text(updated)


def table(rows: dict[str, dict[int, Row]]) -> str:
    lines = ["| rung | 4096^3 TFLOP/s | x cuBLAS | 8192^3 TFLOP/s | x cuBLAS |", "|--|--|--|--|--|"]
    for name in sorted(rows, key=lambda n: (rows[n][4096]["dtype"] == "bf16", n)):
        cells = [name]
        for size in (4096, 8192):
            row = rows[name].get(size)
            cells += [rate(row), f"{row['vs_cublas']:.3f}"] if row else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite headers and table."""
    document = json.loads(Path(sys.argv[1]).read_text())
    gpu, commit = document["environment"]["gpu"].replace("NVIDIA ", ""), sys.argv[2]
    tree = ["git", "rev-parse", f"{commit}:src"]
    if (
        subprocess.check_output(tree, cwd=ROOT, text=True).strip()
        != document["environment"]["src_tree"]
    ):
        raise SystemExit(f"{commit} is not what was measured")
    rows = shown_rows(document)
    for path in sorted(LADDER.glob("*.cu")):
        if path.stem in rows:
            update_header(path, sentence(rows[path.stem], gpu, commit))
    for pair in document["ilp"]:
        rates = pair["tflops"]
        update_header(
            LADDER / f"{pair['rung']}.cu",
            f"{rates['ilp_dependent']:.1f} against {rates['ilp_independent']:.1f} TFLOP/s, "
            f"{pair['ratio']:.2f}x; {gpu}, {commit}.",
        )
    text = DOCUMENT.read_text()
    head, rest = text.split(BEGIN)
    DOCUMENT.write_text(head + BEGIN + "\n" + table(rows) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
