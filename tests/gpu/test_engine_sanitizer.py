"""compute-sanitizer memcheck over a whole engine: no kernel of serving touches what it may not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.engines import SHAPES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "run_engine.py"


def memcheck(*arguments: str, own_allocations: bool) -> subprocess.CompletedProcess[str]:
    """Run run_engine.py under memcheck. own_allocations: each tensor is one of the driver, so that
    a read just outside it is seen; torch's cache would put a neighbour there."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    search = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in search if path),
        "OCTAVO_CHECK_INTEGRITY": "1",
    }
    environment.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
    if own_allocations:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [
        sanitizer,
        "--tool=memcheck",
        "--error-exitcode=1",
        # torch probes the driver with calls that may fail, and raises what matters itself.
        "--report-api-errors=no",
        "--target-processes=application-only",  # not the compilers that Triton starts
        sys.executable,
        str(SCRIPT),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)


def assert_clean(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout
    assert "finished" in run.stdout


@pytest.mark.parametrize("shape", [*SHAPES, "qwen3_moe"])
def test_eager_steps_are_clean(shape: str, tmp_path: Path) -> None:
    assert_clean(memcheck(shape, "eager", str(tmp_path), own_allocations=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_are_clean(shape: str, tmp_path: Path) -> None:
    """With torch's cache: nothing may be allocated from the driver while a graph is captured."""
    assert_clean(memcheck(shape, "graphs", str(tmp_path), own_allocations=False))


def test_a_bad_read_is_seen() -> None:
    run = memcheck("bad-read", own_allocations=True)
    assert run.returncode == 1
    assert "Invalid __global__ read" in run.stdout, run.stdout[-3000:] + run.stderr[-2000:]
