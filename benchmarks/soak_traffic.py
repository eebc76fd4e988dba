"""Random requests for the soak, each made again from its number, and what is kept of their results.

Nothing about a request has to be remembered to run it once more, so the soak's own memory stays
the same however long it lasts.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from dataclasses import dataclass
from typing import Any

from tests.gpu.engines import VOCAB

from octavo import SamplingParams
from octavo.outputs import FinishReason, Logprob, RequestOutput

NUM_PREFIXES = 8
"""Prompts that others begin with."""
PHASE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The engine and the load of a device. Every request fits the pool alone, few fit together."""

    max_prompt: int
    max_output: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    max_live: int
    """Requests of the open loop at a time: more would only wait."""
    rates: tuple[float, ...]
    """Arrivals a second; a phase has one of them."""
    keep_every: int
    """Of the requests that can be repeated, how many give one that is."""

    def engine_settings(self) -> dict[str, Any]:
        """Settings that every device shares, by the names of EngineArgs."""
        return {
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "num_gpu_blocks_override": self.num_blocks,
        }

    def rate_at(self, seconds: float) -> float:
        """Arrivals a second at this time after the start: bursts, calm and lulls in turn."""
        return random.Random(int(seconds / PHASE_SECONDS)).choice(self.rates)


SCALES = {
    "cuda": Scale(3000, 300, 64, 2048, 4096, 1500, 200, (0.0, 0.0, 5.0, 50.0, 400.0), 50),
    "cpu": Scale(200, 24, 8, 128, 512, 36, 24, (0.0, 2.0, 8.0, 50.0), 5),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    number: int
    prompt: dict[str, Any]
    params: SamplingParams

    @property
    def repeatable(self) -> bool:
        """A second run must give the same tokens and scores."""
        seeded = self.params.greedy or self.params.seed is not None
        return seeded and self.params.logprobs is not None


def make_job(number: int, scale: Scale) -> Job:
    """The request of this number, always the same."""
    rng = random.Random(f"job {number}")
    length = _length(rng, scale.max_prompt)
    token_ids = _tokens(rng, length)
    if rng.random() < 0.3:
        prefix = random.Random(f"prefix {rng.randrange(NUM_PREFIXES)}")
        shared = _tokens(prefix, scale.max_prompt // 4)
        token_ids = (shared + token_ids)[: max(length, scale.max_prompt // 8)]
    return Job(number, {"prompt_token_ids": token_ids}, _sampling(rng, scale.max_output))


def _length(rng: random.Random, limit: int) -> int:
    """1 to limit: mostly short, as many of each magnitude."""
    return rng.randint(1, limit) if rng.random() < 0.3 else int(limit ** rng.random())


def _tokens(rng: random.Random, number: int) -> list[int]:
    return rng.choices(range(1, VOCAB), k=number)


def _sampling(rng: random.Random, max_output: int) -> SamplingParams:
    """Any mixture of features; what is rare in practice is not rare here."""
    max_tokens = _length(rng, max_output)
    settings: dict[str, Any] = {"max_tokens": max_tokens, "detokenize": False, "temperature": 0.0}

    def sometimes(share: float, **extra: Any) -> None:
        if rng.random() < share:
            settings.update(extra)

    if rng.random() < 0.6:
        settings["temperature"] = rng.uniform(0.3, 1.5)
        sometimes(0.7, seed=rng.getrandbits(63))
        sometimes(0.3, top_p=rng.uniform(0.5, 1.0))
        sometimes(0.3, top_k=rng.randint(1, 100))
        sometimes(0.15, min_p=rng.uniform(0.0, 0.2))
    sometimes(0.2, repetition_penalty=rng.uniform(0.8, 1.5))
    sometimes(0.2, presence_penalty=rng.uniform(-1, 1), frequency_penalty=rng.uniform(-0.5, 0.5))
    sometimes(0.7, logprobs=rng.choice([0, 0, 0, 5]))
    sometimes(0.03, prompt_logprobs=1)
    sometimes(0.2, stop_token_ids=rng.sample(range(VOCAB), 100))
    sometimes(0.1, min_tokens=rng.randint(0, max_tokens))
    sometimes(0.05, logit_bias=dict.fromkeys(rng.sample(range(VOCAB), 10), 4.0))
    sometimes(0.05, allowed_token_ids=rng.sample(range(VOCAB), 200))
    sometimes(0.1, n=2)
    sometimes(0.01, max_tokens=0, min_tokens=0)
    return SamplingParams(**settings)


def invalid_request(rng: random.Random, scale: Scale) -> tuple[Any, dict[str, Any]]:
    """A prompt and sampling settings that must be refused."""
    prompts: list[Any] = [
        [],
        [VOCAB],
        [-1],
        [1.5],
        "text, and no tokenizer",
        b"bytes",
        {"prompt_token_ids": [1], "unknown": 1},
        [1] * scale.max_model_len,
    ]
    settings: list[dict[str, Any]] = [
        {"temperature": math.nan},
        {"top_p": 2.0},
        {"n": 0},
        {"max_tokens": -1},
        {"logprobs": 1000},
        {"seed": 1 << 70},
        {"stop": "end", "detokenize": False},
        {"allowed_token_ids": [VOCAB]},
        {"logit_bias": {1: 1e9}},
        {"bad_words": ["word"]},
    ]
    if rng.random() < 0.5:
        return rng.choice(prompts), {}
    return [1, 2, 3], rng.choice(settings)


class Tally:
    """What has come of one request, as deltas or at once: lengths, ends, and bits to compare."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.finished = False
        self.reasons: dict[int, FinishReason] = {}
        self.errors: list[str] = []
        self._tokens: dict[int, bytearray] = {}
        self._scores: dict[int, bytearray] = {}
        self._prompt_scores = b""

    def add(self, output: RequestOutput) -> None:
        """News. What no request may ever see is an AssertionError."""
        name = f"request {self.job.number}"
        assert not self.finished, f"{name}: news after its end"
        self.finished = output.finished
        if output.prompt_logprobs is not None:
            scored = len(output.prompt_logprobs)  # fewer than the prompt after an abort
            self._prompt_scores = _score_bits(
                self.job.prompt["prompt_token_ids"][1:scored], output.prompt_logprobs[1:]
            )
        for one in output.outputs:
            assert one.index not in self.reasons, f"{name}: news after a completion's end"
            self._tokens.setdefault(one.index, bytearray()).extend(
                struct.pack(f"{len(one.token_ids)}i", *one.token_ids)
            )
            if one.logprobs is not None:
                assert len(one.logprobs) == len(one.token_ids), f"{name}: tokens without scores"
                self._scores.setdefault(one.index, bytearray()).extend(
                    _score_bits(one.token_ids, one.logprobs)
                )
            if one.finish_reason is not None:
                self.reasons[one.index] = one.finish_reason
            if one.error is not None:
                self.errors.append(one.error)
        if self.finished:
            self._check_end(name)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all completions so far."""
        return sum(len(tokens) // 4 for tokens in self._tokens.values())

    def digest(self) -> bytes:
        """16 bytes of all tokens, and the fp32 bits of their scores and those of the prompt."""
        digest = hashlib.blake2b(self._prompt_scores, digest_size=16)
        for parts in (self._tokens, self._scores):
            for index in sorted(parts):
                digest.update(b"%d:%d:" % (index, len(parts[index])) + parts[index])
        return digest.digest()

    def _check_end(self, name: str) -> None:
        params = self.job.params
        assert len(self.reasons) == params.n, f"{name}: ended with {len(self.reasons)} completions"
        for index, reason in self.reasons.items():
            length = len(self._tokens[index]) // 4
            assert params.max_tokens is not None
            assert length <= params.max_tokens, f"{name}: {length} tokens of {params.max_tokens}"
            if reason == FinishReason.LENGTH:
                assert length == params.max_tokens, f"{name}: cut at {length} tokens"


def _score_bits(token_ids: list[int], entries: list[dict[int, Logprob] | None]) -> bytes:
    """The fp32 bits of the score of each token itself."""
    scores = []
    for token, entry in zip(token_ids, entries, strict=True):
        assert entry is not None
        scores.append(entry[token].logprob)
    return struct.pack(f"{len(scores)}f", *scores)
