"""Each processor against a reference of a few lines of plain Python."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from octavo.sample.edits import Edits, penalize
from octavo.sample.state import Column, SamplingState
from tests.cpu.sample.helpers import EOS, request

VOCAB = 12
LOGITS = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
HISTORY = torch.tensor([[5, 3, 5, 9, 9, 9, 0], [1, 1, 1, 1, 2, 7, 7], [0] * 7], dtype=torch.int32)
PROMPT_LEN, NUM_TOKENS = [2, 4, 3], [6, 5, 3]


def penalized(repetition: Any, presence: Any, frequency: Any) -> torch.Tensor:
    """LOGITS after the penalties of each row."""
    table = torch.zeros(3, len(Column), dtype=torch.float64)
    table[:, Column.REPETITION], table[:, Column.PRESENCE] = repetition, presence
    table[:, Column.FREQUENCY] = frequency
    got, rows = LOGITS.clone(), torch.arange(3)
    counts = torch.tensor(NUM_TOKENS), torch.tensor(PROMPT_LEN)
    penalize(got, rows, rows, table, HISTORY, *counts)
    return got


def edited(
    logits: torch.Tensor,
    words: Any = (),
    num_tokens: int = 0,
    history: torch.Tensor = HISTORY,
    **params: Any,
) -> list[float]:
    """A row after the processors of a request whose output is the first tokens of history[0]."""
    state = SamplingState(1, VOCAB, "cpu")
    state.add(0, request(0, words, **params))
    edits = Edits([0], state.features, state)
    counts = torch.tensor([num_tokens]), torch.tensor([0])
    row: list[float] = edits.apply(logits[None], state.table, history, *counts, penalize)[
        0
    ].tolist()
    return row


def f32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def test_p19_repetition_sees_prompt_and_output() -> None:
    """P19: both, each token once, divided when positive and multiplied when negative."""
    penalty = torch.tensor([1.3, 0.7, 2.0])
    got = penalized(penalty, 0.0, 0.0)
    for row in range(3):
        for token in range(VOCAB):
            x = LOGITS[row, token]
            if token in HISTORY[row, : NUM_TOKENS[row]].tolist():
                x = x / penalty[row] if x > 0 else x * penalty[row]
            assert got[row, token] == x


def test_p19_presence_and_frequency_see_output_only() -> None:
    """P19: counts of the output; the prompt and what lies behind the history do not count."""
    presence, frequency = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.25, 0.1, 2.0])
    got = penalized(1.0, presence, frequency)
    for row in range(3):
        counts = Counter(HISTORY[row, PROMPT_LEN[row] : NUM_TOKENS[row]].tolist())
        for token in range(VOCAB):
            x = LOGITS[row, token]
            if counts[token]:
                x = x - frequency[row] * f32(counts[token]) - presence[row]
            assert got[row, token] == x


def test_bias_is_added_and_minus_infinity_stays() -> None:
    logits = LOGITS[0].clone()
    logits[4] = -math.inf
    expected = logits.clone()
    expected[1] += f32(-3.5)
    assert edited(logits, logit_bias={4: 100.0, 1: -3.5}) == expected.tolist()


def test_allowed_tokens_keep_their_logits() -> None:
    allowed = [x if i in (3, 8) else -math.inf for i, x in enumerate(LOGITS[0].tolist())]
    assert edited(LOGITS[0], allowed_token_ids=[3, 3, 8]) == allowed


@pytest.mark.parametrize("active", [True, False])
def test_end_tokens_are_masked_only_while_active(active: bool) -> None:
    got = edited(LOGITS[0], num_tokens=2 if active else 3, min_tokens=3, stop_token_ids=[6, 6])
    expected = [
        -math.inf if active and i in (EOS, 6) else x for i, x in enumerate(LOGITS[0].tolist())
    ]
    assert got == expected


@pytest.mark.parametrize(
    "history", [[], [5], [4], [4, 5], [5, 4], [4, 4, 5], [9, 4, 5, 4, 5], [3, 9]]
)
def test_bad_words_mask_the_last_token_after_their_prefix(history: list[int]) -> None:
    """Words of one token always; two words that end alike must not undo each other's mask."""
    words = ((7,), (4, 5, 1), (5, 1), (4, 4, 5, 6), (9, 2), (8, 2))
    stored = torch.tensor([[*history, 4, 5, 4, 4]], dtype=torch.int32)
    got = edited(LOGITS[0], words, len(history), stored)

    expected = LOGITS[0].tolist()
    for word in words:
        if history[max(0, len(history) - len(word) + 1) :] == list(word[:-1]):
            expected[word[-1]] = -math.inf
    assert got == expected
