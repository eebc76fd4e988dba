"""Prompts, engines and comparisons shared by the tests on the real model."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput

TEXTS = (
    "The lighthouse keeper climbed the stairs every evening at dusk, counting each step aloud.",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while low <= high:\n",
    "Water boils at a lower temperature on a mountain because the air above it weighs less, and",
    "Question: a train leaves at nine and arrives at noon. How long is the journey?\nAnswer:",
    "In the year the river froze, the market moved onto the ice. Bakers, tailors and a man with a",
    "The three primary colours of light are red, green and blue. Mixed together in equal parts they",
    "Dear committee, I am writing to you about the proposal to plant forty lime trees along the old",
    "A list of things to pack for a week in the north: a warm coat, two pairs of gloves, a torch,",
)
LONG = " ".join(TEXTS)

SEEDED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1234, max_tokens=8, logprobs=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)


def prompts() -> list[str]:
    """Eight prompts of 1 to about 620 tokens, so that a chunk of 501 cuts one of them."""
    longest = " ".join([LONG] * 4)
    return [TEXTS[0], LONG, TEXTS[1], longest, TEXTS[2], TEXTS[3], LONG + TEXTS[4], "A"]


def params(max_tokens: int = 8) -> list[SamplingParams]:
    """Greedy and seeded requests in turn, all different, ignoring EOS so that lengths are known."""
    return [
        dataclasses.replace(
            GREEDY if index % 2 == 0 else SEEDED,
            seed=None if index % 2 == 0 else 1000 + index,
            ignore_eos=True,
            max_tokens=max_tokens,
        )
        for index in range(8)
    ]


@contextmanager
def engine(model: Any, **settings: Any) -> Iterator[LLM]:
    """An LLM that is shut down, with a check that it gave back every block and request slot."""
    small = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 1024}
    with LLM(str(model), **{**small, **settings}) as llm:
        yield llm
        llm.engine.drain()
        core = llm.engine.core
        core.scheduler.check_integrity()
        stats = core.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks


def fingerprint(output: RequestOutput) -> list[tuple[tuple[int, ...], bytes]]:
    """Per completion: the tokens, and the fp32 bits of each sampled token's logprob."""
    prints = []
    for completion in output.outputs:
        assert completion.error is None, completion.error
        assert completion.logprobs is not None
        values = [
            scores[token].logprob
            for token, scores in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        prints.append((tuple(completion.token_ids), struct.pack(f"<{len(values)}f", *values)))
    return prints


def run(llm: LLM, order: Sequence[int] = tuple(range(8)), max_tokens: int = 8) -> list[Any]:
    """Fingerprints of the eight requests run together in the given order, listed by index."""
    texts, settings = prompts(), params(max_tokens)
    outputs = llm.generate([texts[i] for i in order], [settings[i] for i in order], use_tqdm=False)
    by_index = dict(zip(order, outputs, strict=True))
    return [fingerprint(by_index[index]) for index in sorted(by_index)]
