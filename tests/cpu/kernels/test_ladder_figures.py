"""The figures in headers and docs are those of the committed run, and the run keeps the promises."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.kernels.matmul.registry import RUNGS

ROOT = Path(__file__).resolve().parents[3]
RUN = ROOT / "benchmarks" / "results" / "ladder-h200.json"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "ladder_measured.py"
    spec = importlib.util.spec_from_file_location("ladder_measured", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RUN.read_text())
    return loaded


def test_headers_quote_the_committed_run(tool: ModuleType, document: dict[str, Any]) -> None:
    rows = tool.shown_rows(document)
    for rung in RUNGS:
        if rung.kind == "matmul":
            measured = rung.header["Measured"]
            commit = measured.rstrip(".").rsplit(" ", 1)[1]
            assert re.fullmatch("[0-9a-f]{7,40}", commit)
            gpu = document["environment"]["gpu"].replace("NVIDIA ", "")
            assert measured == tool.sentence(rows[rung.name], gpu, commit), rung.name


def test_the_docs_table_is_the_committed_run(tool: ModuleType, document: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "kernels.md").read_text()
    shown = text.split(tool.BEGIN)[1].split(tool.END)[0]
    assert shown.strip() == tool.table(tool.shown_rows(document)).strip()


def test_every_timed_rung_was_right(document: dict[str, Any]) -> None:
    timed = {row["rung"] for row in document["results"]}
    assert timed >= {rung.name for rung in RUNGS if rung.kind == "matmul"}
    assert all(row["ok"] for row in document["results"])


def test_the_committed_run_keeps_the_promises(tool: ModuleType, document: dict[str, Any]) -> None:
    """What docs/kernels.md says of the ladder as a whole."""
    rows = tool.shown_rows(document)
    names = [rung.name for rung in RUNGS if rung.kind == "matmul"]
    best = names[-1]
    assert rows["02_naive"][4096]["tflops"] >= 10 * rows["01_naive_uncoalesced"][4096]["tflops"]
    assert rows["08_warp_tiling_tuned"][4096]["vs_cublas"] >= 0.85
    assert rows[best][8192]["vs_cublas"] >= 1.03
    assert rows[best][4096]["vs_cublas"] >= 1.02
    lost = {
        after
        for before, after in itertools.pairwise(names)
        for size in rows[before].keys() & rows[after].keys()
        if not rows[after][size]["median_us"] <= rows[before][size]["median_us"]
    }
    assert len(lost) <= 2, f"more than two steps gain nothing: {sorted(lost)}"
