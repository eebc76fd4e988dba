"""Scores: right, ranked, finite, and the same bits whatever stands beside the row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sample.logprobs import first_max, prompt_logprobs, score, top_tokens

LOWEST = torch.finfo(torch.float32).min


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("vocab", [5, 64, 1000, 32768, 32769, 49152, 50257])
@pytest.mark.parametrize("threads", [1, 2])
def test_p22_score_bits_do_not_depend_on_the_batch(vocab: int, threads: int) -> None:
    """P22: also where ATen would switch to a two-pass parallel reduction (1 row, over 32768)."""
    logits = logits_of(9, vocab)
    targets = torch.arange(9) % vocab
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = score(logits, targets, [3] * 9)
        for rows in ([0], [4], [8], [3, 7], [8, 2, 5, 1]):
            part = score(logits[rows], targets[rows], [3] * len(rows))
            assert part == [together[row] for row in rows]
        # Another row's k changes which selection runs, not the values.
        mixed = score(logits, targets, [3, 0, 1, min(vocab, 700), 3, 3, -1, 3, 3])
        assert [mixed[row] for row in (0, 4, 8)] == [together[row] for row in (0, 4, 8)]
    finally:
        torch.set_num_threads(before)
    again = score(logits, targets, [3] * 9)
    assert again == together


@pytest.mark.parametrize("vocab", [7, 49152, 151936])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_scores_equal_log_softmax(vocab: int, scale: float) -> None:
    logits = logits_of(4, vocab) * scale
    targets = torch.tensor([0, 3, 5, 6])
    expected = logits.double().log_softmax(1).gather(1, targets[:, None]).flatten()
    got = torch.tensor([s.logprobs[0] for s in score(logits, targets, [0] * 4)])
    torch.testing.assert_close(got, expected.float(), rtol=3e-7, atol=1e-6)


def test_rank_counts_strictly_higher_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf, 2.0]])
    ranks = [score(logits, torch.tensor([token]), [0])[0].rank for token in range(5)]
    assert ranks == [4, 1, 1, 5, 3]


def test_top_tokens_follow_the_chosen_one_and_may_repeat_it() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 2.0]])
    (got,) = score(logits, torch.tensor([4]), [3])
    assert got.token_ids == [4, 1, 2, 4]
    assert got.logprobs[0] == got.logprobs[3]
    (whole,) = score(logits, torch.tensor([4]), [-1])
    assert whole.token_ids == [4, 1, 2, 4, 0, 3]
    assert math.isclose(sum(math.exp(x) for x in whole.logprobs[1:]), 1.0, rel_tol=1e-6)


def test_l01_minus_infinity_is_the_lowest_finite_number() -> None:
    """L01: JSON cannot carry -inf; a masked token's score is the lowest finite fp32."""
    logits = torch.full((1, 70), -math.inf)
    logits[0, 3], logits[0, 9] = 1.0, 0.0
    (got,) = score(logits, torch.tensor([50]), [5])
    assert got.token_ids[:3] == [50, 3, 9]
    assert got.logprobs[0] == LOWEST
    assert got.rank == 3
    assert all(math.isfinite(x) for x in got.logprobs)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-3, 3).map(float), st.just(-0.0)), min_size=1, max_size=320),
    st.integers(1, 320),
)
def test_top_tokens_break_ties_by_token_id(values: list[float], k: int) -> None:
    k = min(k, len(values))
    found, ids = top_tokens(torch.tensor([values]), k)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert ids[0].tolist() == expected
    assert found[0].tolist() == [values[i] for i in expected]


def test_first_max_takes_the_lowest_column() -> None:
    for vocab in (130, 128):
        logits = torch.zeros(2, vocab)
        logits[1, [70, 90, 127]] = 2.0
        columns, values = first_max(logits)
        assert columns.tolist() == [0, 70]
        assert values.tolist() == [0.0, 2.0]
        logits[0, 100] = math.nan
        assert math.isnan(first_max(logits)[1][0])


def test_prompt_scores_are_the_bits_of_sampled_scores() -> None:
    logits = logits_of(40, 8192)
    targets = torch.arange(40) * 3
    assert prompt_logprobs(logits, targets, 2) == score(logits, targets, [2] * 40)
    assert prompt_logprobs(logits[7:8], targets[7:8], 2) == score(logits, targets, [2] * 40)[7:8]


def test_prompt_scores_refuse_nan() -> None:
    logits = logits_of(3, 100)
    logits[1, 5] = math.nan
    with pytest.raises(FloatingPointError):
        prompt_logprobs(logits, torch.tensor([1, 2, 3]), 0)
