"""Each processor against a reference of a few lines of plain Python."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from octavo.sample import processors as p

VOCAB = 12
LOGITS = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
HISTORY = torch.tensor([[5, 3, 5, 9, 9, 9, 0], [1, 1, 1, 1, 2, 7, 7], [0] * 7], dtype=torch.int32)
PROMPT_LEN, NUM_TOKENS = [2, 4, 3], [6, 5, 3]


def occurrences(start: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return p.occurrences(HISTORY, torch.tensor(start), torch.tensor(NUM_TOKENS))


def f32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def test_p19_repetition_sees_prompt_and_output() -> None:
    """P19: both, each token once, divided when positive and multiplied when negative."""
    penalty = torch.tensor([1.3, 0.7, 2.0])
    got = LOGITS.clone()
    p.penalize_repetition(got, *occurrences([0, 0, 0]), penalty)
    for row in range(3):
        for token in range(VOCAB):
            x = LOGITS[row, token]
            if token in HISTORY[row, : NUM_TOKENS[row]].tolist():
                x = x / penalty[row] if x > 0 else x * penalty[row]
            assert got[row, token] == x


def test_p19_presence_and_frequency_see_output_only() -> None:
    """P19: counts of the output; the prompt and what lies behind the history do not count."""
    presence, frequency = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.25, 0.1, 2.0])
    got = LOGITS.clone()
    p.penalize_output(got, *occurrences(PROMPT_LEN), presence, frequency)
    for row in range(3):
        counts = Counter(HISTORY[row, PROMPT_LEN[row] : NUM_TOKENS[row]].tolist())
        for token in range(VOCAB):
            x = LOGITS[row, token]
            if counts[token]:
                x = x - frequency[row] * f32(counts[token]) - presence[row]
            assert got[row, token] == x


def test_bias_is_added_and_minus_infinity_stays() -> None:
    got = LOGITS[0].clone()
    got[4] = -math.inf
    p.add_bias(got, torch.tensor([4, 1]), torch.tensor([100.0, -3.5]))
    expected = LOGITS[0].clone()
    expected[4], expected[1] = -math.inf, expected[1] + f32(-3.5)
    assert torch.equal(got, expected)


def test_allowed_tokens_keep_their_logits() -> None:
    got = LOGITS[0].clone()
    p.keep_only(got, torch.tensor([3, 3, 8]))
    allowed = [x if i in (3, 8) else -math.inf for i, x in enumerate(LOGITS[0].tolist())]
    assert got.tolist() == allowed


@pytest.mark.parametrize("active", [True, False])
def test_end_tokens_are_masked_only_while_active(active: bool) -> None:
    got = LOGITS[0].clone()
    p.mask_tokens(got, torch.tensor([2, 2, 6]), torch.tensor(active))
    expected = [
        -math.inf if active and i in (2, 6) else x for i, x in enumerate(LOGITS[0].tolist())
    ]
    assert got.tolist() == expected


@pytest.mark.parametrize(
    "history", [[], [5], [4], [4, 5], [5, 4], [4, 4, 5], [9, 4, 5, 4, 5], [3, 9]]
)
def test_bad_words_mask_the_last_token_after_their_prefix(history: list[int]) -> None:
    """Words of one token always; two words that end alike must not undo each other's mask."""
    words = [(7,), (4, 5, 1), (5, 1), (4, 4, 5, 6), (9, 2), (8, 2)]
    longest = 3
    prefixes = [[p.NO_TOKEN] * (longest + 1 - len(w)) + list(w[:-1]) for w in words]
    got = LOGITS[0].clone()
    stored = torch.tensor([*history, 4, 5, 4, 4], dtype=torch.int32)
    recent = p.last_tokens(stored, torch.tensor(len(history)), longest)
    p.mask_bad_words(got, torch.tensor(prefixes), torch.tensor([w[-1] for w in words]), recent)

    expected = LOGITS[0].tolist()
    for word in words:
        if history[max(0, len(history) - len(word) + 1) :] == list(word[:-1]):
            expected[word[-1]] = -math.inf
    assert got.tolist() == expected
