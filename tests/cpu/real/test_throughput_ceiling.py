"""The roofline that `octavo bench throughput` puts beside a CPU's result."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM
from octavo.bench.offline import memory_ceiling, run_throughput
from octavo.cli import main


def test_a_cpu_result_stays_below_its_ceiling(smollm2_path: Path) -> None:
    """Steps a second that the memory's speed allows: one request makes fewer."""
    with LLM(str(smollm2_path), dtype="bfloat16", max_model_len=64) as llm:
        result = run_throughput(llm, input_lens=[4], output_lens=[8], temperature=0.0, seed=0)
        ceiling = memory_ceiling(llm)
    assert 1e9 < ceiling["read_bytes_per_s"] < 1e13
    assert 2.6e8 < ceiling["weight_bytes"] < 2.8e8
    assert 0 < result["output_tokens_per_s"] < ceiling["ceiling_steps_per_s"]


def test_it_is_printed(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--num-prompts 1 --input-len 4 --output-len 2 --warmup 0 --max-model-len 64"
    main(["bench", "throughput", str(smollm2_path), "--dtype", "bfloat16", *asked.split()])
    assert "Memory roofline: 269 MB of weights a step at " in capsys.readouterr().out
