"""Drawing: pruning is exact, cuts equal a naive sort, draws follow the distribution."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.sample.draw import Cuts, draw_cut, gumbel_argmax, is_cut, mass_goal
from octavo.sample.random import request_key, row_keys
from tests.cpu.sample.helpers import chi_square_z
from tests.cpu.sample.test_random import noise


def make_cuts(
    rows: int, vocab: int, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> Cuts:
    return Cuts(
        torch.full((rows,), math.log(min_p) if min_p else -math.inf, dtype=torch.float32),
        torch.full((rows,), top_k or vocab),
        torch.full((rows,), top_p, dtype=torch.float64),
    )


def naive_left(row: Tensor, min_p: float, top_k: int, top_p: float) -> list[int]:
    """Token ids that min_p, top_k and top_p leave, by sorting, with exact sums."""
    floor = torch.tensor(math.log(min_p) if min_p else -math.inf, dtype=torch.float32)
    order = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))
    order = [i for i in order if row[i] >= floor][: top_k or None]
    weight = [int(w * 2.0**44) for w in row.clamp(min=-40).exp()[order].tolist()]
    goal = sum(weight) * Fraction(top_p)
    left, reached = [], 0
    for token, w in zip(order, weight, strict=True):
        if left and top_p < 1 and reached >= goal:
            break
        left.append(token)
        reached += w
    return left


def distances(values: list[float]) -> Tensor:
    row = torch.tensor(values, dtype=torch.float32)
    return row - row.max()


# Halves make ties; -inf stands for masked tokens.
logit = st.one_of(
    st.integers(-6, 6).map(lambda v: v / 2),
    st.floats(-30, 8, width=32),
    st.just(-math.inf),
)
rows_of_logits = st.lists(logit, min_size=1, max_size=150).filter(
    lambda v: any(math.isfinite(x) for x in v)
)


@settings(max_examples=150, deadline=None)
@given(
    rows_of_logits,
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0, 1, 2, 5, 40]),
    st.sampled_from([0.0, 1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_cuts_and_draw_equal_the_naive_reference(
    values: list[float], min_p: float, top_k: int, top_p: float, seed: int
) -> None:
    row = distances(values)
    vocab = len(row)
    left = naive_left(row, min_p, min(top_k, vocab), top_p)

    finite = row.isfinite().nonzero().flatten()
    every = row.expand(len(finite), -1).contiguous()
    cuts = make_cuts(len(finite), vocab, min_p, top_k if top_k < vocab else 0, top_p)
    cut = is_cut(every, finite, cuts, mass_goal(every, cuts))
    assert finite[~cut].tolist() == sorted(i for i in left if row[i].isfinite())

    keys = row_keys(torch.tensor([request_key(seed)]), torch.tensor([3]))
    scores = row + noise(keys, vocab)[0]
    expected = min(left, key=lambda i: (-scores[i].item(), i))
    assert draw_cut(row[None], keys, cuts[torch.tensor([0])]).tolist() == [expected]


@settings(max_examples=60, deadline=None)
@given(rows_of_logits, st.integers(0, 2**64 - 1), st.integers(1, 5))
def test_pruned_arg_max_equals_the_full_computation(
    values: list[float], seed: int, rows: int
) -> None:
    row = distances(values)
    keys = row_keys(torch.tensor([request_key(seed)]).expand(rows, 2), torch.arange(rows))
    full = (row + noise(keys, len(row))).argmax(1)
    assert torch.equal(gumbel_argmax(row.expand(rows, -1).contiguous(), keys), full)


@pytest.mark.parametrize("vocab", [64, 1000, 32001, 49152])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_pruned_arg_max_equals_the_full_computation_on_large_rows(vocab: int, scale: float) -> None:
    """scale 0 is the worst case: nothing but noise decides."""
    rows = 8
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    logits[:, :40] += torch.linspace(3 * scale, 0, 40)
    distance = logits - logits.amax(1, keepdim=True)
    keys = row_keys(torch.tensor([request_key(s) for s in range(rows)]), torch.arange(rows))
    expected = (distance + noise(keys, vocab)).argmax(1)
    assert torch.equal(gumbel_argmax(distance.clone(), keys), expected)


def test_p15_extreme_cuts_keep_one_token() -> None:
    """P15: tiny top_p, min_p 1 and top_k 1 all leave exactly the most likely token, lowest id."""
    row = torch.tensor([[-1.0, 0.0, 0.0, -2.0]]).expand(50, -1).contiguous()
    keys = row_keys(torch.tensor([request_key(0)]).expand(50, 2), torch.arange(50))
    for settings_ in ({"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}):
        assert set(draw_cut(row, keys, make_cuts(50, 4, **settings_)).tolist()) == {1}
    assert set(draw_cut(row, keys, make_cuts(50, 4, min_p=1.0)).tolist()) == {1, 2}


def test_top_p_on_equal_tokens_takes_the_lowest_ids() -> None:
    """Four equal tokens, top_p 0.5: exactly the two lowest ids, not three, not any two."""
    row = torch.zeros(400, 4)
    keys = row_keys(torch.tensor([request_key(1)]).expand(400, 2), torch.arange(400))
    assert set(draw_cut(row, keys, make_cuts(400, 4, top_p=0.5)).tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [(1.0, 0, 0, 1.0), (0.7, 0, 8, 1.0), (1.3, 0, 0, 0.8), (0.9, 0, 20, 0.9), (1.0, 0.05, 0, 0.95)],
)
def test_draws_follow_the_distribution(
    temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Chi-square over 20,000 positions; a masked token is never drawn."""
    draws, vocab = 20_000, 50
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * 2
    logits[7] = -math.inf
    row = (logits - logits.max()) / temperature
    left = naive_left(row, min_p, top_k, top_p)
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[left] = row[left].double().softmax(0) * draws
    keys = row_keys(torch.tensor([request_key(99)]).expand(draws, 2), torch.arange(draws))
    cuts = make_cuts(draws, vocab, min_p, top_k, top_p)
    tokens = draw_cut(row.expand(draws, -1).contiguous(), keys, cuts)
    assert abs(chi_square_z(torch.bincount(tokens, minlength=vocab), expected)) < 4.5
