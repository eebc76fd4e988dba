"""Prompts and parameters in, validated EngineRequests out.

Owns every rule that needs the model: vocabulary, context length, engine limits. What passes here
is in range for everything below. Each refusal is an InvalidRequestError that names the field.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.config.engine import EngineConfig
from octavo.core.request import EngineRequest
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError, expect, shown
from octavo.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, token ids, or a dict with `prompt` and/or `prompt_token_ids` and maybe `cache_salt`."""

_BYTES = bytes | bytearray | memoryview
MAX_IDS = 2**24
"""Longer than any context; a range may be longer than memory."""
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_LOGPROBS = ("logprobs", "prompt_logprobs")
_MASK64 = 2**64 - 1
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """One prompt, ready for the core."""

    prompt_text: str | None
    """None if the caller gave token ids only."""
    engine_requests: list[EngineRequest]
    """One a completion, in index order."""


class InputProcessor:
    """Turns what a caller wrote into EngineRequests.

    Length rule: prompt plus at least one output token fit into max_model_len; a prompt of exactly
    max_model_len tokens is accepted with max_tokens=0. max_tokens is cut to the room that is left
    (all of it for None); min_tokens does not extend it.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = config.model.vocab_size
        self._max_model_len = config.scheduler.max_model_len
        self._policy = config.scheduler.policy
        self._max_logprobs = config.max_logprobs
        self._seed = config.seed
        self._counter = itertools.count()
        eos = set(config.model.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        self._eos_token_ids = tuple(sorted(i for i in eos if 0 <= i < self._vocab_size))

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> ProcessedInput:
        """n EngineRequests: `request_id` itself for n=1, else `request_id/0`, `.../1` and so on."""
        _non_empty("request_id", request_id)
        expect("sampling_params", params, SamplingParams, "SamplingParams")
        expect("priority", priority, int, "an integer")
        if priority and self._policy != "priority":
            raise InvalidRequestError("priority", "needs scheduling_policy='priority'")
        if arrival_time is None:
            arrival_time = time.monotonic()
        wanted = "seconds, a finite number"
        if not abs(expect("arrival_time", arrival_time, (int, float), wanted)) < _LARGEST:  # or NaN
            reason = f"must be {wanted}, not {shown(arrival_time)}"
            raise InvalidRequestError("arrival_time", reason)
        text, token_ids, cache_salt = self.read_prompt(prompt)
        max_tokens = self._room(len(token_ids), params.max_tokens)
        params = self._check_logprobs(params)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        if self._tokenizer is None and params.stop:
            raise InvalidRequestError("stop", "stop strings need a tokenizer")
        bad_words = self._encode_bad_words(params)
        self._check_something_is_left(params, bad_words)
        if params.seed is not None:
            seed = params.seed & _MASK64
        else:
            seed = split_seed(self._seed & _MASK64, next(self._counter))
        # The prompt is scored once, by the first completion.
        sibling_params = dataclasses.replace(params, prompt_logprobs=None)
        requests = [
            EngineRequest(
                request_id=request_id if params.n == 1 else f"{request_id}/{i}",
                prompt_token_ids=token_ids,
                sampling_params=params if i == 0 else sibling_params,
                seed=split_seed(seed, i),
                eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
                bad_words_token_ids=bad_words,
                max_tokens=max_tokens,
                arrival_time=float(arrival_time),
                priority=priority,
                cache_salt=cache_salt,
            )
            for i in range(params.n)
        ]
        return ProcessedInput(text, requests)

    def read_prompt(
        self, prompt: Prompt, max_length: int | None = None
    ) -> tuple[str | None, list[int], str | None]:
        """Text (if given), token ids (cut at their end to max_length, if given), cache salt."""
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        elif isinstance(prompt, Sequence) and not isinstance(prompt, _BYTES):
            prompt = {"prompt_token_ids": prompt}
        elif not isinstance(prompt, Mapping):
            raise InvalidRequestError("prompt", f"must be text, ids or a dict, not {shown(prompt)}")
        for key in prompt.keys() - set(_PROMPT_KEYS):
            raise InvalidRequestError(str(key), "is not a part of a prompt that is supported")
        text, given_ids, salt = map(prompt.get, _PROMPT_KEYS)
        if salt is not None:
            _non_empty("cache_salt", salt)
        if text is not None:
            expect("prompt", text, str, "text")
        if given_ids is None:
            if text is None:
                raise InvalidRequestError("prompt", "neither prompt nor prompt_token_ids is given")
            field, token_ids = "prompt", self._encode("prompt", text, max_length=max_length)
        else:
            field = "prompt_token_ids"
            if isinstance(given_ids, str | _BYTES):
                text = f"must be a list of integers, not {shown(given_ids)}"
                raise InvalidRequestError(field, text)
            ids = expect(field, given_ids, Sequence, "a list of integers")
            if max_length is None and next(itertools.islice(ids, MAX_IDS, None), None) is not None:
                raise InvalidRequestError(field, f"must not have more than {MAX_IDS} ids")
            token_ids = list(itertools.islice(ids, max_length))
        if not token_ids:
            raise InvalidRequestError(field, "must not be empty")
        self._check_ids(field, token_ids)
        return text, token_ids, salt

    def _room(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The output limit. The prompt must leave room for one token, if one is wanted."""
        room = self._max_model_len - num_prompt_tokens
        if room < (0 if max_tokens == 0 else 1):
            wanted = "" if max_tokens == 0 else " and at least one output token"
            text = f"{num_prompt_tokens} prompt tokens{wanted} do not fit into max_model_len="
            raise InvalidRequestError("prompt", f"{text}{self._max_model_len}")
        return room if max_tokens is None else min(room, max_tokens)

    def _check_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Apply max_logprobs; -1 becomes the size of the vocabulary."""
        limit = self._vocab_size if self._max_logprobs == -1 else self._max_logprobs
        wanted: dict[str, Any] = {name: getattr(params, name) for name in _LOGPROBS}
        for field, value in wanted.items():
            if value == -1:
                wanted[field] = value = self._vocab_size
            if value is not None and value > limit:
                text = f"{shown(value)} a position is more than the {limit} this engine allows"
                raise InvalidRequestError(field, text)
        return dataclasses.replace(params, **wanted)

    def _check_ids(self, field: str, token_ids: Iterable[Any]) -> None:
        limit = self._vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(field, f"token id {shown(token_id)} is not an integer")
            if not 0 <= token_id < limit:
                text = f"token id {shown(token_id)} is outside the vocabulary of {limit}"
                raise InvalidRequestError(field, text)

    def _encode(
        self, field: str, text: str, special_tokens: bool = True, max_length: int | None = None
    ) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(field, "text needs a tokenizer; this engine takes token ids")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise InvalidRequestError(field, f"is not valid Unicode: {exc.reason}") from None
        try:
            if max_length is not None:
                return self._tokenizer.encode_cut(text, max_length)
            return self._tokenizer.encode(text, add_special_tokens=special_tokens)
        except InvalidRequestError as exc:
            raise InvalidRequestError(field, exc.message) from exc

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            bare = word.lstrip()
            sequences = [tuple(self._encode("bad_words", f, False)) for f in (bare, " " + bare)]
            sequences = [s for s in sequences if s]
            if not bare or not sequences:
                raise InvalidRequestError("bad_words", f"{shown(word)} has no token")
            self._check_ids("bad_words", itertools.chain(*sequences))
            found.update(dict.fromkeys(sequences))
        return _shortest_ends(found)

    def _check_something_is_left(
        self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]
    ) -> None:
        """Some token must be possible at every position, or sampling would have no answer.

        A bias of -100 is no ban: it is added, and the largest sum wins whatever it is.
        """
        banned = {sequence[0] for sequence in bad_words if len(sequence) == 1}
        early = set[int]()  # removed before min_tokens
        if params.min_tokens > 0:
            early |= set(params.stop_token_ids or ())
            early |= set() if params.ignore_eos else set(self._eos_token_ids)
        allowed = params.allowed_token_ids
        tokens = range(self._vocab_size) if allowed is None else allowed
        if not (banned | early).issuperset(tokens):
            return
        cause = "bad_words" if banned.issuperset(tokens) else "min_tokens"
        if allowed is not None:
            raise InvalidRequestError("allowed_token_ids", f"{cause} leaves none of them")
        raise InvalidRequestError(cause, "leaves no token of the vocabulary")


def _non_empty(field: str, value: Any) -> None:
    if not expect(field, value, str, "non-empty text"):
        raise InvalidRequestError(field, "must not be empty")


def _shortest_ends(sequences: Collection[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The sequences without those that end in another one, which can never be completed anyway."""
    kept = set[tuple[int, ...]]()
    last: tuple[int, ...] | None = None
    # Sorted by their ends, those that end in a kept one come right after it.
    for turned in sorted(sequence[::-1] for sequence in sequences):
        if last is None or turned[: len(last)] != last:
            last = turned
            kept.add(turned)
    return tuple(sequence for sequence in sequences if sequence[::-1] in kept)


def split_seed(seed: int, index: int) -> int:
    """Stream `index` of a 64-bit seed: the finaliser of splitmix64 on seed + (index + 1) * golden.

    Completion i of a request has split_seed(s, i), so it does not change with n. s is the
    request's own seed, or split_seed(engine seed, number of unseeded requests before it).
    """
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
