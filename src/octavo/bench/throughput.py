"""Offline throughput: many requests submitted at once, timed until the last token."""

from __future__ import annotations

import sys
import time
from typing import Any

from octavo.bench.datasets import check_produced, random_prompts
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
    return {
        "num_requests": len(outputs),
        "elapsed_s": elapsed,
        "requests_per_s": len(outputs) / elapsed,
        "total_tokens_per_s": (sum(input_lens) + produced) / elapsed,
        "output_tokens_per_s": produced / elapsed,
    }
