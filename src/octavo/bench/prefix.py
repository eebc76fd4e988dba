"""What the prefix cache saves: TTFT of a prompt, and of one that shares its first tokens."""

from __future__ import annotations

import statistics
from typing import Any

from octavo.bench.datasets import check_produced, random_prompts
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

TAIL = 20  # tokens of its own that each prompt ends with


def run_prefix(llm: LLM, *, shared_len: int, iterations: int) -> dict[str, Any]:
    """Per iteration a fresh prefix of `shared_len` tokens and two prompts with it.

    Returns medians: TTFT in seconds and tokens computed for the first and for the second prompt;
    and the lengths of every request. Raises OctavoError if a request failed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    config = llm.engine.config
    vocab_size = config.model.vocab_size
    rows: dict[str, list[tuple[float, int]]] = {"cold": [], "warm": []}
    llm.generate(random_prompts([shared_len], vocab_size, seed=iterations), params, use_tqdm=False)
    for seed in range(iterations):
        shared, *tails = random_prompts([shared_len, TAIL, TAIL], vocab_size, seed)
        for name, tail in zip(rows, tails, strict=True):
            [output] = llm.generate([shared + tail], params, use_tqdm=False)
            check_produced([output], [1], config.scheduler.max_model_len)
            assert output.metrics is not None
            assert output.metrics.ttft is not None
            computed = len(output.prompt_token_ids) - output.num_cached_tokens
            rows[name].append((output.metrics.ttft, computed))
    return {
        "input_len": shared_len + TAIL,
        "output_len": 1,
        "shared_len": shared_len,
        **{f"{name}_ttft_s": statistics.median(t for t, _ in rows[name]) for name in rows},
        **{f"{name}_computed_tokens": statistics.median(n for _, n in rows[name]) for name in rows},
    }
