"""The roofline that `octavo bench throughput` puts beside a CPU's result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import main


def test_a_cpu_result_has_its_roofline(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights once a step. Other work on the machine may make either figure the larger one."""
    asked = "--num-prompts 1 --input-len 4 --output-len 2 --warmup 0 --max-model-len 64"
    main(["bench", "throughput", str(smollm2_path), "--dtype", "bfloat16", *asked.split()])
    *_, line, document = capsys.readouterr().out.splitlines()
    assert line.startswith("Memory roofline: 269 MB of weights a step at ")
    result = json.loads(document)
    assert 1e8 < result["read_bytes_per_s"] < 1e13
    steps = result["read_bytes_per_s"] / result["weight_bytes"]
    assert result["ceiling_steps_per_s"] == pytest.approx(steps)
