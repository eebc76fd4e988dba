"""Sampling settings by request slot: numbers in one device table, rare features in dicts.

No penalty counts live here: they follow from the token history at each step, so nothing has to be
rebuilt after a preemption or undone after a rejected draft. Nothing here waits for a GPU: what goes
there is copied from pinned memory, in the order of the stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.request import EngineRequest
from octavo.sample.random import request_key
from octavo.sampling_params import SamplingParams

_FP32 = torch.finfo(torch.float32)
NO_TOKEN = -1
"""Fills bad-word prefixes on the left, and the history before its first token."""


class Feature(IntFlag):
    """What the sampler has to do for a slot beyond taking the most likely token."""

    RANDOM = 1
    """Not greedy, no cut."""
    RANDOM_CUT = 2
    """Not greedy, with min_p, top_k or top_p."""
    REPETITION = 4
    OUTPUT_PENALTY = 8
    """Presence or frequency."""
    BIAS = 16
    ALLOWED = 32
    BAD_WORDS = 64
    MIN_TOKENS = 128
    LOGPROBS = 256

    ANY_RANDOM = RANDOM | RANDOM_CUT
    PROCESSORS = REPETITION | OUTPUT_PENALTY | BIAS | ALLOWED | BAD_WORDS | MIN_TOKENS
    """Features that change logits before temperature."""


class Column(IntEnum):
    """Columns of the table; float64 holds each of these values exactly."""

    TEMPERATURE = 0
    LOG_MIN_P = 1
    TOP_K = 2
    TOP_P = 3
    REPETITION = 4
    PRESENCE = 5
    FREQUENCY = 6
    MIN_TOKENS = 7
    KEY_FIRST = 8
    KEY_SECOND = 9
    FEATURES = 10
    """Feature bits."""


class SamplingState:
    """Settings of the requests in the slots. A slot's entries are all replaced by add()."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.features = np.zeros(max_num_seqs, dtype=np.int64)
        """(max_num_seqs,) on the host: Feature bits, 0 for an empty slot."""
        self.version = 0
        """Grows with every change: what was derived from an equal version is up to date."""
        self.table = torch.zeros(max_num_seqs, len(Column), dtype=torch.float64, device=self.device)
        """(max_num_seqs, columns) on the device; a removed request's row stays until the next."""
        self.logprobs: dict[int, int] = {}
        """Slot -> number of top tokens to report; absent if logprobs were not asked for."""
        self.bias: dict[int, tuple[Tensor, ...]] = {}
        """Slot -> token ids int64 and values fp32."""
        self.allowed: dict[int, tuple[Tensor, ...]] = {}
        """Slot -> token ids int64."""
        self.bad_words: dict[int, tuple[Tensor, ...]] = {}
        """Slot -> the last token of each word, int64, and the tokens before it, (words, longest prefix)
        int64, right-aligned, NO_TOKEN on the left."""
        self.end_ids: dict[int, tuple[Tensor, ...]] = {}
        """Slot -> EOS and stop tokens, int64, for slots with min_tokens."""

    def add(self, slot: int, request: EngineRequest) -> None:
        """Fill an empty slot. All token ids of the request are inside the vocabulary."""
        self.remove(slot)
        params = request.sampling_params
        features = _features(params, request)
        self.features[slot] = features
        numbers = _numbers(params, features, request.seed, self.vocab_size)
        self.table[slot] = to_device(numbers, torch.float64, self.device)
        if params.logprobs is not None:
            num_top = self.vocab_size if params.logprobs < 0 else params.logprobs
            self.logprobs[slot] = min(num_top, self.vocab_size)
        if params.logit_bias:
            values = to_device([*params.logit_bias.values()], torch.float32, self.device)
            self.bias[slot] = self._ids(params.logit_bias), values
        if params.allowed_token_ids is not None:
            self.allowed[slot] = (self._ids(params.allowed_token_ids),)
        if words := request.bad_words_token_ids:
            longest = max(map(len, words)) - 1
            rows = [[NO_TOKEN] * (longest - len(word) + 1) + [*word[:-1]] for word in words]
            prefixes = to_device(rows, torch.int64, self.device)
            self.bad_words[slot] = self._ids(word[-1] for word in words), prefixes
        if params.min_tokens > 0:
            ends = {*request.eos_token_ids, *(params.stop_token_ids or ())}
            self.end_ids[slot] = (self._ids(ends),)

    def remove(self, slot: int) -> None:
        """Empty a slot; an empty slot stays empty."""
        self.version += 1
        self.features[slot] = 0
        for entries in (self.logprobs, self.bias, self.allowed, self.bad_words, self.end_ids):
            entries.pop(slot, None)

    def _ids(self, token_ids: Iterable[int]) -> Tensor:
        ids = list(token_ids)
        assert all(0 <= token < self.vocab_size for token in ids), "token id outside the vocabulary"
        return to_device(ids, torch.int64, self.device)


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested) numbers or of an array, copied without waiting for the device."""
    # The allocator of pinned memory gives this piece out again only when the copy has run.
    host = torch.as_tensor(values, dtype=dtype)
    pinned = host.pin_memory() if device.type == "cuda" else host
    return pinned.to(device, non_blocking=True)


def _features(params: SamplingParams, request: EngineRequest) -> Feature:
    cut = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
    wanted = {
        Feature.RANDOM: not params.greedy and not cut,
        Feature.RANDOM_CUT: not params.greedy and cut,
        Feature.REPETITION: params.repetition_penalty != 1,
        Feature.OUTPUT_PENALTY: params.presence_penalty != 0 or params.frequency_penalty != 0,
        Feature.BIAS: bool(params.logit_bias),
        Feature.ALLOWED: params.allowed_token_ids is not None,
        Feature.BAD_WORDS: bool(request.bad_words_token_ids),
        Feature.MIN_TOKENS: params.min_tokens > 0,
        Feature.LOGPROBS: params.logprobs is not None,
    }
    return Feature(sum(feature for feature, is_wanted in wanted.items() if is_wanted))


def _numbers(params: SamplingParams, features: Feature, seed: int, vocab_size: int) -> list[float]:
    """One row of the table. Values beyond fp32 are brought into its range: inf would make NaN."""
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    key = request_key(seed)
    numbers = {
        Column.TEMPERATURE: min(params.temperature, _FP32.max),
        Column.LOG_MIN_P: math.log(params.min_p) if params.min_p > 0 else -math.inf,
        Column.TOP_K: top_k,
        Column.TOP_P: params.top_p,
        Column.REPETITION: min(max(params.repetition_penalty, _FP32.tiny), _FP32.max),
        Column.PRESENCE: params.presence_penalty,
        Column.FREQUENCY: params.frequency_penalty,
        Column.MIN_TOKENS: min(params.min_tokens, 2**31),
        Column.KEY_FIRST: key[0],
        Column.KEY_SECOND: key[1],
        Column.FEATURES: features,
    }
    return [float(numbers[column]) for column in Column]
