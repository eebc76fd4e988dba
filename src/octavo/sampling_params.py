"""What a caller may ask of sampling, checked once, in the names vLLM uses.

Rules that need the model (vocabulary, context length) are checked by the input processor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

from octavo.errors import InvalidRequestError, expect, shown

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy: dividing by it says nothing more
MAX_ITEMS = 2**20
"""Of a list: more than there are tokens in any vocabulary."""
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields whose defaults a model's generation_config.json may set, as in vLLM."""
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")


class RequestOutputKind(StrEnum):
    """What each RequestOutput of a request carries."""

    CUMULATIVE = "cumulative"
    """Everything so far, at every step."""
    DELTA = "delta"
    """Only what is new since the last one."""
    FINAL_ONLY = "final_only"
    """One output, when all completions have ended."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request. Raises InvalidRequestError that names the field.

    Sequences may be given as lists; they are kept as tuples. `stop` may be one string.
    """

    n: int = 1
    """Completions for the prompt; each has its own random stream."""
    temperature: float = 1.0
    """0 (or under 1e-5) is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this total probability, at least one. 1 is off."""
    top_k: int = 0
    """Keep the k most likely tokens. 0 and -1 are off; more than the vocabulary is off too."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one. 0 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from each token that occurs in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens in prompt or output; over 0."""
    seed: int | None = None
    """Fixes the random stream whatever else is in the batch. None or -1: the engine draws one."""
    max_tokens: int | None = 16
    """Output tokens at most. None: up to the context limit. 0: prompt scores only."""
    min_tokens: int = 0
    """EOS, stop_token_ids and stop strings are inert before this many output tokens."""
    stop: Sequence[str] | str | None = None
    """End at the first of these strings; the output is cut before it."""
    stop_token_ids: Sequence[int] | None = None
    """End at any of these tokens, besides EOS; the token stays in token_ids, not in the text."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Also report the k most likely tokens at each output position; 0: the sampled one only."""
    prompt_logprobs: int | None = None
    """The same for prompt positions; the first has no score."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> value in [-100, 100] added to its logit."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be sampled."""
    bad_words: Sequence[str] | None = None
    """Strings whose token sequences may not be completed."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind | None = None
    """What a streamed output carries. None: LLM.stream gives deltas, LLMEngine.step everything."""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_reals()
        self._check_tokens()

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken, with no randomness."""
        return self.temperature < GREEDY_BELOW

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _normalise(self) -> None:
        if self.seed == -1 and not isinstance(self.seed, bool):
            self._set("seed", None)
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
                raise InvalidRequestError(name, f"must be a list, not {shown(value)}")
            if value is not None:
                items = tuple(islice(expect(name, value, Iterable, "a list"), MAX_ITEMS + 1))
                if len(items) > MAX_ITEMS:
                    raise InvalidRequestError(name, f"must not have more than {MAX_ITEMS} items")
                self._set(name, items)
        if self.logit_bias is not None:
            bias = expect("logit_bias", self.logit_bias, Mapping, "a map from token ids to values")
            self._set("logit_bias", dict(bias))

    def _check_counts(self) -> None:
        _integer("n", self.n, 1, 16384)
        _integer("top_k", self.top_k, -1)
        _integer("min_tokens", self.min_tokens, 0)
        for name, low in (("max_tokens", 0), ("logprobs", -1), ("prompt_logprobs", -1)):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, low)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            text = f"{shown(self.min_tokens)} is more than max_tokens={shown(self.max_tokens)}"
            raise InvalidRequestError("min_tokens", text)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in _FLAGS:
            expect(name, getattr(self, name), bool, "true or false")
        if self.output_kind is not None:
            if self.output_kind not in tuple(RequestOutputKind):
                raise InvalidRequestError("output_kind", f"{shown(self.output_kind)} is not a kind")
            self._set("output_kind", RequestOutputKind(self.output_kind))
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop", "stop strings need detokenize=True")

    def _check_reals(self) -> None:
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0:
            raise InvalidRequestError("repetition_penalty", "must be over 0")

    def _check_tokens(self) -> None:
        for name in ("stop", "bad_words"):
            for value in getattr(self, name) or ():
                if not isinstance(value, str) or not value:
                    raise InvalidRequestError(name, f"{shown(value)} is not a non-empty string")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for value in getattr(self, name) or ():
                _integer(name, value, 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids", "must not be empty")
        for token_id, value in (self.logit_bias or {}).items():
            _integer("logit_bias", token_id, 0)
            _real("logit_bias", value, -100.0, 100.0)


def _integer(field: str, value: Any, low: int, high: int | None = None) -> None:
    expect(field, value, int, "an integer")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(field, f"must be {limit}, not {shown(value)}")


def _real(field: str, value: Any, low: float, high: float) -> None:
    expect(field, value, (int, float), "a number")
    # Compared, not converted: an int may be too large for a float. NaN fails every comparison.
    if not low <= value <= min(high, sys.float_info.max):
        wanted = f"in [{low}, {high}]" if high < math.inf else f"finite and at least {low}"
        raise InvalidRequestError(field, f"must be {wanted}, not {shown(value)}")
