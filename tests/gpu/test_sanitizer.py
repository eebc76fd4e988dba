"""compute-sanitizer over all bf16 rungs: no bad access, no shared-memory hazard."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels.matmul.registry import RUNGS

ROOT = Path(__file__).resolve().parents[2]


NUMBERS = [str(rung.number) for rung in RUNGS if rung.dtype == "bf16"]
PARTS = 4  # for as many workers of pytest-xdist: racecheck of all rungs takes minutes


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("tool", ["racecheck", "memcheck"])
def test_bf16_rungs_are_clean(tool: str, part: int) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    numbers = NUMBERS[part::PARTS]
    search = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src")])
    script = [sys.executable, "-m", "tests.gpu.run_rungs", *numbers]
    run = subprocess.run(
        [sanitizer, f"--tool={tool}", "--error-exitcode=9", *script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert run.stdout.count("checked") == len(numbers)
