"""Latency of one batch: the time from submitting it to its last token, repeated."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from octavo.bench.datasets import check_produced, random_prompts
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run_latency(
    llm: LLM, *, input_len: int, output_len: int, batch_size: int, warmup: int, iterations: int
) -> dict[str, Any]:
    """Time `iterations` batches of fresh random prompts, after `warmup` uncounted ones.

    Returns seconds: every latency, mean, percentiles, and output tokens/s at the median. Raises
    OctavoError if a batch produced fewer tokens than asked for.
    """
    params = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    config = llm.engine.config
    latencies = []
    for iteration in range(warmup + iterations):
        prompts = random_prompts([input_len] * batch_size, config.model.vocab_size, seed=iteration)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        elapsed = time.perf_counter() - start
        produced = check_produced(
            outputs, [output_len] * batch_size, config.scheduler.max_model_len
        )
        if iteration >= warmup:
            latencies.append(elapsed)
    return {
        "latencies": latencies,
        "avg_latency": statistics.fmean(latencies),
        "percentiles": {str(p): percentile(latencies, p) for p in PERCENTILES},
        "output_tokens_per_s": produced / statistics.median(latencies),
    }


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between closest ranks, as numpy's default."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
