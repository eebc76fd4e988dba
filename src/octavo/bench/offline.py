"""Offline measurements: latency of a batch, throughput of many requests, what the prefix cache saves.

Prompts are random and new in each run; EOS is ignored. OctavoError: a run produced fewer tokens than
asked for.
"""

from __future__ import annotations

import statistics
import sys
import time
import timeit
from typing import Any

import numpy as np
import torch

from octavo.bench.datasets import check_produced, random_prompts
from octavo.config.step_cost import step_operations
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)
TAIL = 20  # tokens of its own that each prompt of `run_prefix` ends with


def exactly(num_tokens: int, temperature: float = 0.0) -> SamplingParams:
    """That many output tokens, whatever they are; no text."""
    return SamplingParams(
        temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )


def time_requests(
    llm: LLM, input_lens: list[int], output_lens: list[int], temperature: float, seed: int
) -> float:
    """Seconds from submitting one request per pair of lengths to the last token of all."""
    config = llm.engine.config
    prompts = random_prompts(input_lens, config.model.vocab_size, seed)
    params = [exactly(num_tokens, temperature) for num_tokens in output_lens]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    elapsed = time.perf_counter() - start
    check_produced(outputs, output_lens, config.scheduler.max_model_len)
    return elapsed


def run_latency(
    llm: LLM, *, input_len: int, output_len: int, batch_size: int, warmup: int, iterations: int
) -> dict[str, Any]:
    """Time `iterations` batches after `warmup` uncounted ones.

    Returns seconds: every latency, mean, percentiles; and output tokens/s at the median.
    """
    lengths = [input_len] * batch_size, [output_len] * batch_size
    runs = [time_requests(llm, *lengths, 0.0, seed) for seed in range(warmup + iterations)]
    latencies = runs[warmup:]
    return {
        "latencies": latencies,
        "avg_latency": statistics.fmean(latencies),
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
        "output_tokens_per_s": batch_size * output_len / statistics.median(latencies),
    }


def run_throughput(
    llm: LLM, input_lens: list[int], output_lens: list[int], temperature: float, seed: int
) -> dict[str, Any]:
    """Run one request per pair of lengths, all at once. Returns rates a second and the totals.

    The prefix cache should be off, or repeated runs measure the cache.
    """
    elapsed = time_requests(llm, input_lens, output_lens, temperature, seed)
    produced = sum(output_lens)
    return {
        "num_requests": len(input_lens),
        "elapsed_s": elapsed,
        "requests_per_s": len(input_lens) / elapsed,
        "total_tokens_per_s": (sum(input_lens) + produced) / elapsed,
        "output_tokens_per_s": produced / elapsed,
    }


def memory_ceiling(llm: LLM, num_bytes: int = 1 << 28, repeats: int = 20) -> dict[str, float]:
    """What a CPU's memory allows at one request: each decoded token needs the weights once.

    Reading is measured: the best of `repeats` sums of num_bytes by torch's threads.
    """
    numbers = torch.ones(num_bytes // 8, dtype=torch.int64)
    speed = num_bytes / min(timeit.repeat(numbers.sum, number=1, repeat=repeats))
    weights = sum(one.weight_bytes for one in step_operations(llm.engine.config.model, [(1, 1)], 1))
    return {
        "read_bytes_per_s": speed,
        "weight_bytes": weights,
        "ceiling_steps_per_s": speed / weights,
    }


def run_prefix(llm: LLM, *, input_len: int, iterations: int) -> dict[str, Any]:
    """Per iteration two prompts that share their first `input_len` tokens, which are new.

    Returns medians: TTFT in seconds and tokens computed for the first and for the second prompt;
    and the lengths of every request.
    """
    config = llm.engine.config
    vocab_size = config.model.vocab_size
    rows: dict[str, list[tuple[float, int]]] = {"cold": [], "warm": []}
    time_requests(llm, [input_len], [1], 0.0, seed=iterations)  # a warm-up
    for seed in range(iterations):
        shared, *tails = random_prompts([input_len, TAIL, TAIL], vocab_size, seed)
        for name, tail in zip(rows, tails, strict=True):
            [output] = llm.generate([shared + tail], exactly(1), use_tqdm=False)
            check_produced([output], [1], config.scheduler.max_model_len)
            assert output.metrics is not None
            assert output.metrics.ttft is not None
            computed = len(output.prompt_token_ids) - output.num_cached_tokens
            rows[name].append((output.metrics.ttft, computed))
    result: dict[str, Any] = {"input_len": input_len + TAIL, "output_len": 1}
    result["shared_len"] = input_len
    for name, found in rows.items():
        result[f"{name}_ttft_s"] = statistics.median(ttft for ttft, _ in found)
        result[f"{name}_computed_tokens"] = statistics.median(computed for _, computed in found)
    return result
