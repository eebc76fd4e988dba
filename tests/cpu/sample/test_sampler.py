"""The sampler as a whole: mixed batches, independence of rows, failures that stay in their row."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from octavo.sample.sampler import SamplerOutput
from octavo.sampling_params import SamplingParams
from tests.cpu.sample.helpers import EOS, MIX, Batch, chi_square_z, mixed, request

VOCAB = 256


def row_of(output: SamplerOutput, row: int) -> Any:
    return output.token_ids[row].item(), output.logprobs.get(row), output.errors.get(row)


@pytest.mark.parametrize("vocab", [VOCAB, 1000, 49152])
def test_p16_p20_each_row_alone_equals_it_in_any_batch(vocab: int) -> None:
    """P16, P20, P22: tokens and score bits; random subsets, orders, fp32 and bf16 logits."""
    batch, logits = mixed(vocab)
    generator = torch.Generator().manual_seed(6)
    for dtype in (torch.float32, torch.bfloat16):
        cast = logits.to(dtype)
        alone = [row_of(batch.sample(cast[i : i + 1], [i]), 0) for i in range(len(MIX))]
        for _ in range(12):
            size = int(torch.randint(1, len(MIX) + 1, (1,), generator=generator))
            slots = torch.randperm(len(MIX), generator=generator)[:size].tolist()
            output = batch.sample(cast[slots], slots)
            assert [row_of(output, row) for row in range(size)] == [alone[s] for s in slots]


def test_p16_seeded_request_beside_unseeded_ones() -> None:
    """P16: the same tokens in 4 runs, whatever the batch mates' settings."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(8))
    seen = set()
    for mate in ({}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.1, "logprobs": 5}):
        batch = Batch(VOCAB)
        batch.put(5, request(42))
        batch.put(2, request(1000, **mate))
        output = batch.sample(logits, [2, 5])
        seen.add(output.token_ids[1].item())
    assert len(seen) == 1


def test_position_and_seed_change_the_draw() -> None:
    """n completions (split seeds) and successive positions are different draws."""
    batch = Batch(VOCAB)
    for slot in range(16):
        batch.put(slot, request(slot + 2**40))
    flat = torch.zeros(16, VOCAB)
    assert len(set(batch.sample(flat, list(range(16))).token_ids.tolist())) > 10
    rows = batch.sample(flat, [0] * 16, list(range(1, 17))).token_ids.tolist()
    assert len(set(rows)) > 10
    again = batch.sample(flat[:1], [0], [7]).token_ids.item()
    assert again == rows[6]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1.1e-5, 1e-6, 1e-12, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_p13_tiny_temperature_equals_greedy(temperature: float, dtype: torch.dtype) -> None:
    """P13: no overflow to inf, NaN and token 0; also beside a large logit range and masks."""
    logits = torch.arange(VOCAB).flip(0).repeat(3, 1).to(dtype)
    logits[0, 77], logits[1, 90], logits[2, :10] = 60000.0, 300.0, -math.inf
    batch = Batch(VOCAB)
    for slot in range(3):
        batch.put(slot, request(slot, temperature=temperature, top_p=0.9 if slot else 1.0))
    assert batch.sample(logits, [0, 1, 2]).token_ids.tolist() == [77, 90, 10]


def test_huge_temperature_never_draws_a_masked_token() -> None:
    """A temperature beyond fp32 must not turn -inf / inf into NaN."""
    batch = Batch(VOCAB)
    batch.put(0, request(0, temperature=1e308, allowed_token_ids=[5, 6]))
    output = batch.sample(torch.randn(40, VOCAB), [0] * 40, list(range(1, 41)))
    assert set(output.token_ids.tolist()) == {5, 6}
    assert not output.errors


def test_p14_masked_greedy_row_beside_a_random_row() -> None:
    """P14: the greedy row skips scaling; masks stay -inf in both."""
    batch = Batch(VOCAB)
    batch.put(0, request(0, temperature=0.0, allowed_token_ids=[17, 30]))
    batch.put(1, request(1, temperature=0.7, allowed_token_ids=[40]))
    logits = torch.zeros(2, VOCAB)
    logits[0, 30] = -5.0
    output = batch.sample(logits, [0, 1])
    assert output.token_ids.tolist() == [17, 40]
    assert not output.errors


@pytest.mark.parametrize(
    "params", [{"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 0.0}]
)
def test_p15_smallest_settings_take_the_most_likely_token(params: dict[str, Any]) -> None:
    """P15: never an empty set."""
    batch = Batch(VOCAB)
    batch.put(0, request(0, **params))
    logits = torch.randn(20, VOCAB)
    output = batch.sample(logits, [0] * 20, list(range(1, 21)))
    assert torch.equal(output.token_ids, logits.argmax(1))


def test_p15_off_values_change_nothing() -> None:
    """P15: top_p 1, top_k -1, 0, vocabulary and more are off."""
    logits = torch.randn(1, VOCAB).expand(30, -1)
    drawn = []
    for params in ({}, {"top_p": 1.0}, {"top_k": -1}, {"top_k": VOCAB}, {"top_k": 2**70}):
        batch = Batch(VOCAB)
        batch.put(0, request(9, **params))
        drawn.append(batch.sample(logits, [0] * 30, list(range(1, 31))).token_ids.tolist())
    assert all(tokens == drawn[0] for tokens in drawn)


def test_p09_row_with_every_token_masked_fails_alone() -> None:
    """P09: an error for that row, never token 0; the neighbours' results do not change."""
    batch, logits = mixed(VOCAB)
    before = batch.sample(logits, list(range(len(MIX))))
    batch.put(12, request(0, ((9,),), allowed_token_ids=[9], logprobs=2))
    batch.put(13, request(0, temperature=0.0, logprobs=1))
    bad = torch.full((2, VOCAB), -math.inf)
    bad[0, 9] = 1.0
    output = batch.sample(torch.cat([bad, logits]), [12, 13, *range(len(MIX))])
    assert set(output.errors) == {0, 1}
    assert output.token_ids[:2].tolist() == [-1, -1]
    assert not {0, 1} & set(output.logprobs)
    for row in range(len(MIX)):
        assert row_of(output, row + 2) == row_of(before, row)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"allowed_token_ids": [3]}]
)
def test_row_with_nan_or_infinity_fails_alone(value: float, params: dict[str, Any]) -> None:
    """Also if a mask would hide the bad logit: the model's output cannot be trusted."""
    batch = Batch(VOCAB)
    batch.put(0, request(0, logprobs=1, **params))
    batch.put(1, request(1, logprobs=1))
    logits = torch.randn(2, VOCAB)
    solo = row_of(batch.sample(logits[1:], [1]), 0)
    logits[0, 100] = value
    output = batch.sample(logits, [0, 1])
    assert list(output.errors) == [0]
    assert output.token_ids[0] == -1
    assert row_of(output, 1) == solo


def test_penalty_that_overflows_fails_its_row() -> None:
    batch = Batch(VOCAB)
    batch.put(0, request(0, repetition_penalty=5e-324), [3])
    batch.put(1, request(1))
    output = batch.sample(torch.full((2, VOCAB), 100.0), [0, 1])
    assert list(output.errors) == [0]


def test_p07_min_tokens_with_stop_ids_leaves_neighbours_alone() -> None:
    """P07: EOS and stop tokens are masked in their own row only, up to min_tokens outputs."""
    logits = torch.zeros(2, VOCAB)
    logits[:, EOS], logits[:, VOCAB - 1], logits[:, 50] = 9.0, 8.0, 7.0
    for num_output, expected in ((0, 50), (2, 50), (3, EOS)):
        batch = Batch(VOCAB)
        params = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": [VOCAB - 1]}
        batch.put(0, request(0, **params), [1, 1], [8] * num_output)
        batch.put(1, request(0, temperature=0.0))
        assert batch.sample(logits, [0, 1]).token_ids.tolist() == [expected, EOS]


def test_p06_bias_beside_a_plain_request() -> None:
    """P06: the neighbour is unaffected; 100 wins over any ordinary logit, -100 loses."""
    logits = torch.randn(2, VOCAB)
    batch = Batch(VOCAB)
    batch.put(0, request(0, temperature=0.0, logit_bias={VOCAB - 1: 100.0, 0: -100.0}))
    batch.put(1, request(0, temperature=0.0))
    assert batch.sample(logits, [0, 1]).token_ids.tolist() == [VOCAB - 1, logits[1].argmax()]


PENALTIES = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.1},
    {"frequency_penalty": 0.9},
    {"repetition_penalty": 1.4, "presence_penalty": 1.1, "frequency_penalty": 0.9},
]


def penalized(logits: torch.Tensor, prompt: list[int], output: list[int], p: SamplingParams) -> Any:
    x = logits.clone()
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token, count in Counter(output).items():
        x[token] = x[token] - p.frequency_penalty * count - p.presence_penalty
    return x


@pytest.mark.parametrize("params", PENALTIES, ids=lambda p: "+".join(p))
def test_p19_penalties_at_steps_1_2_and_after_preemption(params: dict[str, Any]) -> None:
    """P19: 'Paris Paris Paris': the first step already sees the prompt; a request that was
    preempted and added again (another slot, history rewritten) continues exactly."""
    prompt, output = [9, 9, 9, 4], []
    generator = torch.Generator().manual_seed(3)
    batch, slot = Batch(16), 0
    req = request(0, temperature=0.0, **params)
    for step in range(6):
        if step == 3:
            batch.state.remove(slot)
            slot = 7
        batch.put(slot, req, prompt, output)
        logits = torch.randn(1, 16, generator=generator) * 2
        logits[0, 9] += 3.0
        expected = int(penalized(logits[0], prompt, output, req.sampling_params).argmax())
        assert batch.sample(logits, [slot]).token_ids.tolist() == [expected], step
        output.append(expected)


def test_p20_short_penalised_request_beside_a_long_plain_one() -> None:
    """P20: padding and stale tokens behind a short history are not penalised, in either order."""
    batch = Batch(VOCAB)
    batch.put(0, request(0, repetition_penalty=2.0, temperature=0.0), [5], [6])
    batch.put(1, request(1, presence_penalty=1.0), list(range(20)), list(range(20)))
    logits = torch.rand(2, VOCAB) + 5.0
    solo = [row_of(batch.sample(logits[i : i + 1], [i]), 0) for i in (0, 1)]
    for order in ([0, 1], [1, 0]):
        output = batch.sample(logits[order], order)
        assert [row_of(output, row) for row in (0, 1)] == [solo[i] for i in order]


def test_x01_rows_of_one_request_obey_every_processor() -> None:
    """X01: min_p and logit_bias hold at each verified position, not only at the last; every row
    equals the row of a request that reached the same position without speculation."""
    batch = Batch(VOCAB)
    params = {"min_p": 0.5, "logit_bias": {7: -100.0}, "repetition_penalty": 1.2, "min_tokens": 3}
    batch.put(0, request(5, ((30, 31),), **params), [1, 2], [30, 7, 30, 8])
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(12))
    logits[:, [7, 31, EOS]] = 9.0
    together = batch.sample(logits, [0] * 5, [2, 3, 4, 5, 6])
    assert 7 not in together.token_ids
    assert EOS not in together.token_ids[:3]
    assert 31 not in together.token_ids[[1, 3]]
    for row in range(5):
        alone = batch.sample(logits[row : row + 1], [0], [2 + row])
        assert row_of(alone, 0) == row_of(together, row)


def test_logprobs_are_raw_and_only_for_rows_that_asked() -> None:
    """Scores come from before temperature, bias and masks, as vLLM's raw_logprobs."""
    batch = Batch(VOCAB)
    batch.put(0, request(0, temperature=0.0, logit_bias={5: 100.0}, logprobs=1))
    batch.put(1, request(1))
    batch.put(2, request(2, temperature=3.0, logprobs=-1))
    logits = torch.randn(3, VOCAB)
    output = batch.sample(logits, [0, 1, 2])
    assert set(output.logprobs) == {0, 2}
    raw = logits.log_softmax(1)
    assert output.token_ids[0] == 5
    assert output.logprobs[0].token_ids == [5, int(logits[0].argmax())]
    assert math.isclose(output.logprobs[0].logprobs[0], raw[0, 5].item(), rel_tol=1e-5)
    assert output.logprobs[0].rank == 1 + int((logits[0] > logits[0, 5]).sum())
    assert len(output.logprobs[2].token_ids) == 1 + VOCAB


def test_chi_square_through_the_whole_sampler() -> None:
    """20,000 positions of one request with temperature, top_k, top_p and a bias."""
    draws, vocab = 20_000, 40
    batch = Batch(vocab)
    params = {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "logit_bias": {3: 2.0}}
    batch.put(0, request(77, **params))
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    output = batch.sample(logits.expand(draws, -1), [0] * draws, list(range(1, draws + 1)))
    scaled = logits.double().clone()
    scaled[3] += 2.0
    probabilities = (scaled / 0.8).softmax(0)
    values, ids = probabilities.topk(12)
    values = values / values.sum()
    left = values.cumsum(0) - values < 0.95
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[ids[left]] = values[left] / values[left].sum() * draws
    assert abs(chi_square_z(torch.bincount(output.token_ids, minlength=vocab), expected)) < 4.5


def test_many_rows_are_drawn_in_parts_with_the_same_result(monkeypatch: Any) -> None:
    """The split that bounds memory does not show."""
    batch = Batch(VOCAB)
    batch.put(0, request(1, top_p=0.8))
    logits = torch.randn(30, VOCAB)
    whole = batch.sample(logits, [0] * 30, list(range(1, 31))).token_ids
    monkeypatch.setattr("octavo.sample.sampler._DRAW_ELEMENTS", VOCAB * 7)
    assert torch.equal(batch.sample(logits, [0] * 30, list(range(1, 31))).token_ids, whole)


def test_empty_batch() -> None:
    output = Batch(VOCAB).sample(torch.empty(0, VOCAB), [], [])
    assert output.token_ids.tolist() == []
    assert not output.logprobs
    assert not output.errors
