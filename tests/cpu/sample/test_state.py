"""Slots are reused: nothing of a former request may show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.sample.state import SamplingState
from tests.cpu.sample.helpers import Batch, request

EVERYTHING: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.2,
    "top_k": 2,
    "min_p": 0.5,
    "repetition_penalty": 2.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {4: 50.0},
    "allowed_token_ids": [3, 4],
    "min_tokens": 5,
    "stop_token_ids": [6],
    "logprobs": 4,
    "max_tokens": None,
}


@pytest.mark.parametrize("remove", [True, False])
def test_reused_slot_is_as_new(remove: bool) -> None:
    used, fresh = Batch(64), Batch(64)
    used.put(3, request(9, ((1, 2), (5,)), **EVERYTHING), [1, 2, 3], [4] * 5)
    if remove:
        used.state.remove(3)
    for batch in (used, fresh):
        batch.put(3, request(8, temperature=0.9), [7])
    logits = torch.randn(1, 64)
    a, b = (batch.sample(logits, [3]) for batch in (used, fresh))
    assert torch.equal(a.token_ids, b.token_ids)
    assert a.logprobs == b.logprobs == {}
    assert torch.equal(used.state.table[3], fresh.state.table[3])


def test_remove_empties_every_entry_and_may_be_repeated() -> None:
    state = SamplingState(4, 64, "cpu")
    state.add(2, request(9, ((1, 2),), **EVERYTHING))
    state.remove(2)
    state.remove(2)
    assert state.features.tolist() == [0] * 4
    for entries in (state.logprobs, state.bias, state.allowed, state.bad_words, state.end_ids):
        assert entries == {}


def test_numbers_beyond_the_table_are_brought_into_range() -> None:
    """Python integers and float64 extremes must not overflow tensors or become inf in fp32."""
    state = SamplingState(1, 64, "cpu")
    extremes = {
        "temperature": 1e308,
        "top_k": 2**80,
        "min_tokens": 2**80,
        "max_tokens": None,
        "repetition_penalty": 1e308,
    }
    state.add(0, request(2**64 - 1, **extremes))
    assert state.table.float().isfinite()[0, [0, 2, 3, 4, 5, 6, 7]].all()


def test_token_ids_outside_the_vocabulary_are_a_bug_of_the_caller() -> None:
    """P07: admission refuses them; here an assertion stops them before any logit is touched."""
    state = SamplingState(1, 64, "cpu")
    for params in (
        {"logit_bias": {64: 1.0}},
        {"allowed_token_ids": [64]},
        {"stop_token_ids": [69], "min_tokens": 1},
    ):
        with pytest.raises(AssertionError):
            state.add(0, request(0, **params))
    with pytest.raises(AssertionError):
        state.add(0, request(0, ((1, 64),)))
