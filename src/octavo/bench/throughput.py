"""Offline throughput: many requests submitted at once, timed until the last token."""

from __future__ import annotations

import time
from typing import Any

from octavo.bench.datasets import random_prompts
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams


def run_throughput(
    llm: LLM, *, input_lens: list[int], output_lens: list[int], temperature: float, seed: int
) -> dict[str, Any]:
    """Run one request per pair of lengths (EOS ignored). Returns rates a second and the totals.

    The prefix cache should be off, or repeated runs measure the cache.
    """
    vocab_size = llm.engine.config.model.vocab_size
    prompts = random_prompts(input_lens, vocab_size, seed)
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in output_lens
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    if produced != sum(output_lens):
        failed = [output.outputs[0].error for output in outputs if output.outputs[0].error]
        raise RuntimeError(f"{produced} tokens instead of {sum(output_lens)}: {failed[:3]}")
    return {
        "num_requests": len(outputs),
        "elapsed_s": elapsed,
        "requests_per_s": len(outputs) / elapsed,
        "total_tokens_per_s": (sum(input_lens) + produced) / elapsed,
        "output_tokens_per_s": produced / elapsed,
    }
