"""Offline measurements: latency of a batch, throughput of many requests, what the prefix cache saves.

Prompts are random and new in each run, the same for every engine; EOS is ignored. OctavoError: a run
produced fewer tokens than asked for, and a figure of anything else is no measurement.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import timeit
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from octavo.config.step_cost import step_operations
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)
TAIL = 20  # tokens of its own that each prompt of `run_prefix` ends with


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of the given lengths; ids avoid the ends of the vocabulary, where control tokens are.

    A vocabulary too small for that margin is used whole.
    """
    generator = random.Random(seed)
    low, high = (100, vocab_size - 1000) if vocab_size > 2000 else (0, vocab_size)
    return [[generator.randrange(low, high) for _ in range(length)] for length in lengths]


def check_produced(outputs: Sequence[RequestOutput], length: int) -> None:
    """Raises OctavoError unless each output has `length` tokens: with both sums, and the errors of
    failed requests."""
    got = [len(out.outputs[0].token_ids) for out in outputs]
    if set(got) == {length}:
        return
    if failed := [error for out in outputs if (error := out.outputs[0].error)]:
        reasons = "; ".join(dict.fromkeys(failed[:3]))
        why = f"{len(failed)} of {len(outputs)} requests failed: {reasons}"
    else:
        out, number = next(row for row in zip(outputs, got, strict=True) if row[1] != length)
        prompt = len(out.prompt_token_ids)
        why = f"a prompt of {prompt} tokens and an output of {length} ended after {number}"
        why += f" ({out.outputs[0].finish_reason})"
    wanted = length * len(outputs)
    raise OctavoError(f"{sum(got)} of {wanted} output tokens were produced: {why}")


def exactly(num_tokens: int, temperature: float = 0.0) -> SamplingParams:
    """That many output tokens, whatever they are; no text."""
    return SamplingParams(
        temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )


def check_fits(llm: LLM, input_len: int, output_len: int) -> None:
    """Raises OctavoError for lengths that no request can have, before prompts are made of them."""
    if input_len + output_len > (limit := llm.engine.config.scheduler.max_model_len):
        text = f"a prompt of {input_len} tokens and an output of {output_len} do not fit into"
        raise OctavoError(f"{text} max_model_len={limit}")


def time_requests(
    llm: LLM, count: int, input_len: int, output_len: int, seed: int, temperature: float = 0.0
) -> float:
    """Seconds from submitting `count` requests to the last token of all."""
    check_fits(llm, input_len, output_len)
    prompts = random_prompts([input_len] * count, llm.engine.config.model.vocab_size, seed)
    params = exactly(output_len, temperature)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    elapsed = time.perf_counter() - start
    check_produced(outputs, output_len)
    return elapsed


def run_latency(
    llm: LLM, *, input_len: int, output_len: int, batch_size: int, warmup: int, iterations: int
) -> dict[str, Any]:
    """Time `iterations` batches after `warmup` uncounted ones.

    Returns seconds: every latency, mean, percentiles; and output tokens/s at the median.
    """
    sizes = batch_size, input_len, output_len
    latencies = [time_requests(llm, *sizes, seed) for seed in range(warmup + iterations)][warmup:]
    return {
        "latencies": latencies,
        "avg_latency": statistics.fmean(latencies),
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
        "output_tokens_per_s": batch_size * output_len / statistics.median(latencies),
    }


def run_throughput(
    llm: LLM, *, input_len: int, output_len: int, num_prompts: int, warmup: int, temperature: float
) -> dict[str, Any]:
    """Run `num_prompts` requests at once, after `warmup` uncounted runs.

    Returns rates a second and the totals, on a CPU `memory_ceiling` as well. The prefix cache should
    be off, or repeated runs measure the cache.
    """
    sizes = num_prompts, input_len, output_len
    elapsed = [time_requests(llm, *sizes, seed, temperature) for seed in range(warmup + 1)][-1]
    found = {
        "num_requests": num_prompts,
        "elapsed_s": elapsed,
        "requests_per_s": num_prompts / elapsed,
        "total_tokens_per_s": num_prompts * (input_len + output_len) / elapsed,
        "output_tokens_per_s": num_prompts * output_len / elapsed,
    }
    return found | (memory_ceiling(llm) if llm.engine.config.device == "cpu" else {})


def memory_ceiling(llm: LLM) -> dict[str, float]:
    """What a CPU's memory allows at one request: each decoded token needs the weights once.

    Reading is measured: the best of 20 sums of 256 MiB by torch's threads.
    """
    numbers = torch.ones(1 << 25, dtype=torch.int64)
    speed = numbers.nbytes / min(timeit.repeat(numbers.sum, number=1, repeat=20))
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
    check_fits(llm, input_len + TAIL, 1)
    vocab_size = llm.engine.config.model.vocab_size
    rows: dict[str, list[tuple[float, int]]] = {"cold": [], "warm": []}
    time_requests(llm, 1, input_len, 1, seed=iterations)  # a warm-up
    for seed in range(iterations):
        shared, *tails = random_prompts([input_len, TAIL, TAIL], vocab_size, seed)
        for name, tail in zip(rows, tails, strict=True):
            [output] = llm.generate([shared + tail], exactly(1), use_tqdm=False)
            check_produced([output], 1)
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
