"""The ceiling that `octavo bench throughput` puts beside a CPU's result."""

from __future__ import annotations

from octavo import LLM
from octavo.bench.throughput import read_bandwidth, run_throughput


def test_a_cpu_result_has_its_ceiling(letters: str) -> None:
    """Steps a second that the memory's speed allows: what was reached is below it."""
    assert read_bandwidth(1 << 24, 2) > 1e8
    with LLM(letters, load_format="dummy") as llm:
        result = run_throughput(llm, input_lens=[4], output_lens=[3], temperature=0.0, seed=0)
        one_step = llm.engine.config.model.weight_bytes()
    assert result["decode_ceiling_steps_per_s"] > result["output_tokens_per_s"]
    assert result["decode_ceiling_steps_per_s"] < 1e12 / one_step * 2
