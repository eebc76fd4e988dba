"""The ceiling that `octavo bench throughput` puts beside a CPU's result."""

from __future__ import annotations

from pathlib import Path

from octavo import LLM
from octavo.bench.throughput import read_bandwidth, run_throughput


def test_a_cpu_result_has_its_ceiling(smollm2_path: Path) -> None:
    """Steps a second that the memory's speed allows: one request makes fewer."""
    assert 1e8 < read_bandwidth(1 << 26, 2) < 1e13
    with LLM(str(smollm2_path), dtype="bfloat16", max_model_len=64) as llm:
        result = run_throughput(llm, input_lens=[4], output_lens=[8], temperature=0.0, seed=0)
    assert 0 < result["output_tokens_per_s"] < result["decode_ceiling_steps_per_s"]
