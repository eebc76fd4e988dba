"""Builds requests, a state and one sampler call out of plain lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.core.request import EngineRequest
from octavo.sample.sampler import Sampler, SamplerOutput
from octavo.sample.state import SamplingState
from octavo.sampling_params import SamplingParams

MAX_LEN = 48
EOS = 2
MIX: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1, "top_k": 30, "top_p": 0.7},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": -0.3, "logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"logit_bias": {3: 5.0, 200: -100.0}, "logprobs": -1},
    {"allowed_token_ids": [9, 8, 250], "top_p": 0.5},
    {"min_tokens": 20, "stop_token_ids": [7, 11], "temperature": 0.0},
    {"words": ((4, 5), (6,), (1, 2, 5)), "repetition_penalty": 0.7},
]
"""Settings of requests, each processor, cut and kind of score among them."""


def request(seed: int = 0, words: tuple[tuple[int, ...], ...] = (), **params: Any) -> EngineRequest:
    return EngineRequest(
        "r",
        [1],
        SamplingParams(**params),
        seed=seed,
        eos_token_ids=(EOS,),
        bad_words_token_ids=words,
    )


class Batch:
    """Requests in slots 0, 1, ... with their tokens; rows are (slot, number of known tokens)."""

    def __init__(self, vocab: int) -> None:
        self.state = SamplingState(16, vocab, "cpu")
        # Stale tokens beyond each history, as a reused slot leaves them: they must not count.
        self.history = torch.randint(
            0, vocab, (16, MAX_LEN), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
        )
        self.prompt_len = [0] * 16
        self.num_tokens = [0] * 16

    def put(
        self, slot: int, req: EngineRequest, prompt: list[int] | None = None, output: Any = ()
    ) -> int:
        tokens = (prompt or [1]) + list(output)
        self.state.add(slot, req)
        self.history[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.prompt_len[slot] = len(prompt or [1])
        self.num_tokens[slot] = len(tokens)
        return slot

    def sample(
        self, logits: Tensor, slots: list[int], num_tokens: list[int] | None = None
    ) -> SamplerOutput:
        known = num_tokens or [self.num_tokens[slot] for slot in slots]
        return Sampler().sample(
            logits.clone(),
            slots,
            self.state,
            self.history,
            torch.tensor(known),
            torch.tensor([self.prompt_len[slot] for slot in slots]),
        )


def mixed(vocab: int) -> tuple[Batch, Tensor]:
    """Requests with MIX in slots 0, 1, ..., and logits for them."""
    generator = torch.Generator().manual_seed(4)
    batch = Batch(vocab)
    for slot, params in enumerate(MIX):
        words = params.get("words", ())
        params = {key: value for key, value in params.items() if key != "words"}
        tokens = torch.randint(0, vocab, (4 + slot,), generator=generator).tolist()
        tokens[-2:] = [2, 4] if words else tokens[-2:]
        batch.put(slot, request(slot, words, max_tokens=50, **params), tokens[:3], tokens[3:])
    return batch, torch.randn(len(MIX), vocab, generator=generator) * 3


def chi_square_z(counts: Tensor, expected: Tensor) -> float:
    """Chi-square statistic as standard deviations from its mean; bins expecting under 5 merged."""
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]]).double()
    keep = expected > 0
    assert counts[~keep].sum() == 0, "an impossible outcome was drawn"
    counts, expected = counts[keep], expected[keep]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    dof = max(len(counts) - 1, 1)
    return (statistic - dof) / (2 * dof) ** 0.5
