"""Offline throughput: many requests submitted at once, timed until the last token.

On a CPU the ceiling stands beside it: the weights that a step of decoding reads, at the speed at which
this machine's threads read memory.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from octavo.bench.datasets import check_produced, random_prompts
from octavo.config.step_cost import step_operations
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams


def run_throughput(
    llm: LLM, *, input_lens: list[int], output_lens: list[int], temperature: float, seed: int
) -> dict[str, Any]:
    """Run one request per pair of lengths (EOS ignored). Returns rates a second and the totals.

    The prefix cache should be off, or repeated runs measure the cache. Raises OctavoError if the
    run produced fewer tokens than asked for.
    """
    config = llm.engine.config
    prompts = random_prompts(input_lens, config.model.vocab_size, seed)
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in output_lens
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    elapsed = time.perf_counter() - start
    produced = check_produced(outputs, output_lens, config.scheduler.max_model_len)
    ceiling = {}
    if config.device == "cpu":
        weights = sum(one.weight_bytes for one in step_operations(config.model, [(1, 1)], 1))
        ceiling["decode_ceiling_steps_per_s"] = read_bandwidth() / weights
    return {
        **ceiling,
        "num_requests": len(outputs),
        "elapsed_s": elapsed,
        "requests_per_s": len(outputs) / elapsed,
        "total_tokens_per_s": (sum(input_lens) + produced) / elapsed,
        "output_tokens_per_s": produced / elapsed,
    }


def read_bandwidth(num_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes a second that torch's threads read from memory: the best of `repeats` sums.

    num_bytes should be about that of the weights, so that caches help as much as they do there.
    """
    numbers = torch.ones(num_bytes // 8, dtype=torch.int64)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, num_bytes / (time.perf_counter() - start))
    return best
