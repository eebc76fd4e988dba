"""The GPU sampler's kernels in Triton's interpreter, against the CPU sampler: same tokens and scores."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from octavo.kernels.triton import sampling_cut, sampling_noise
from octavo.sample.device_sampler import RESULTS_KEPT, DeviceSampler
from octavo.sample.state import Column, Feature
from tests.cpu.kernels.triton.interpreter_repairs import repair
from tests.cpu.sample.helpers import EOS, MIX, Batch, mixed, request

repair()

Collected = tuple[list[int], dict[int, str], Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a row at a vocabulary that the interpreter can bear."""
    monkeypatch.setattr(DeviceSampler, "chunk", 128)


@pytest.fixture(autouse=True)
def faster_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half its time goes into patching `tl` again at each call of a device function, and into
    checks of integer overflow, which the hash wants."""

    plain = interpreter.InterpretedFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__.startswith("octavo"):
            return function.rewrite()(*args, **kwargs)
        return plain(function, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def launch(batch: Batch, logits: Tensor, slots: list[int], **options: Any) -> Collected:
    sampler = DeviceSampler(16, logits.shape[1], torch.device("cpu"))
    sample = sampler.launch(
        logits,
        slots,
        torch.tensor(slots, dtype=torch.int32),
        batch.state,
        batch.history,
        torch.tensor(batch.num_tokens, dtype=torch.int32),
        torch.tensor(batch.prompt_len, dtype=torch.int32),
        **{"write_back": False, **options},
    )
    tokens, errors, logprobs = sample.collect()
    assert sample.results[:, 0].tolist() == [max(token, 0) for token in tokens]
    return tokens, errors, logprobs


def check(batch: Batch, logits: Tensor, slots: list[int]) -> Collected:
    """The result, after comparing it with the CPU sampler's."""
    expected = batch.sample(logits, slots)
    found = tokens, errors, logprobs = launch(batch, logits, slots)
    assert tokens == expected.token_ids.tolist()
    assert errors == expected.errors
    assert list(logprobs) == list(expected.logprobs)
    for row, scores in logprobs.items():
        assert scores.token_ids == expected.logprobs[row].token_ids
        assert scores.rank == expected.logprobs[row].rank
        torch.testing.assert_close(
            torch.tensor(scores.logprobs),
            torch.tensor(expected.logprobs[row].logprobs),
            rtol=1e-6,
            atol=1e-6,
        )
    return found


def test_layout_of_the_table_is_that_of_the_state() -> None:
    """The kernels may not import the state: names and numbers must agree."""
    for column in Column:
        if column is not Column.MIN_TOKENS:
            assert getattr(sampling_noise, column.name).value == column, column
    for feature in (Feature.RANDOM, Feature.RANDOM_CUT, Feature.LOGPROBS):
        assert getattr(sampling_noise, feature.name).value == feature, feature
    assert sampling_noise.TABLE_WIDTH.value == len(Column)


@pytest.mark.parametrize(("vocab", "dtype"), [(256, torch.bfloat16), (333, torch.float32)])
def test_mixed_batch_equals_the_cpu_sampler(vocab: int, dtype: torch.dtype) -> None:
    batch, logits = mixed(vocab)
    before = logits.to(dtype).clone()
    given_ = before.clone()
    check(batch, given_, list(range(len(MIX))))
    assert torch.equal(given_, before), "the logits were overwritten"


def test_each_row_alone_equals_it_in_any_batch() -> None:
    batch, logits = mixed(256)
    slots = [3, 5, 8, 11]
    logits = logits[slots]

    def row_of(found: Collected, row: int) -> Any:
        return found[0][row], found[1].get(row), found[2].get(row)

    together = launch(batch, logits, slots)
    for i, slot in enumerate(slots):
        assert row_of(launch(batch, logits[i : i + 1], [slot]), 0) == row_of(together, i)


logit = st.one_of(
    st.integers(-6, 6).map(lambda v: v / 2),
    st.floats(-30, 8, width=32),
    st.just(-math.inf),
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(logit, min_size=1, max_size=200),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0, 1, 2, 5, 40]),
    st.sampled_from([0.0, 1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_any_row_equals_the_cpu_sampler(
    values: list[float], temperature: float, min_p: float, top_k: int, top_p: float, seed: int
) -> None:
    batch = Batch(len(values))
    params = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    batch.put(0, request(seed, logprobs=1, **params))
    check(batch, torch.tensor([values]), [0])


@pytest.mark.parametrize(("scale", "list_size"), [(0.0, 8192), (1.0, 16)])
def test_top_k_with_top_p(scale: float, list_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many redraws on flat rows; top_k above the number of blocks; a list that is too short."""
    monkeypatch.setattr(sampling_cut, "LIST_SIZE", list_size)
    generator = torch.Generator().manual_seed(2)
    batch = Batch(700)
    for slot, top_k in enumerate((2, 12, 300)):
        batch.put(slot, request(slot, top_k=top_k, top_p=0.8, min_p=0.001 * slot))
    check(batch, torch.randn(3, 700, generator=generator) * scale, list(range(3)))


def test_failures_stay_in_their_rows() -> None:
    batch, logits = mixed(256)
    mates = [3, 8, 11]
    logits = logits[mates]
    before = launch(batch, logits, mates)
    for slot, params in ((12, {"top_p": 0.5}), (13, {"temperature": 0.0}), (14, {})):
        batch.put(slot, request(slot, logprobs=2, **params))
    batch.put(15, request(15, allowed_token_ids=[9], logit_bias={9: 1.0}))
    bad = torch.zeros(4, 256)
    bad[0, 140], bad[1, 3], bad[2], bad[3, 9] = math.nan, math.inf, -math.inf, -math.inf
    slots = [12, 13, 14, 15, *mates]
    tokens, errors, logprobs = check(batch, torch.cat([bad, logits]), slots)
    assert set(errors) == {0, 1, 2, 3}
    assert tokens[4:] == before[0]
    assert {row - 4: scores for row, scores in logprobs.items()} == before[2]


def test_bad_words_of_several_rows_and_lengths() -> None:
    """Patterns are padded to the longest of all rows; one row's history is shorter than them."""
    batch = Batch(64)
    rows = [((1, 2, 3, 9), (9,)), ((5, 9),), ((4, 5, 9), (6, 9)), ((7,), (8,))]
    for slot, words in enumerate(rows):
        prompt = [1] if slot == 1 else [1, 2, 4, 5]
        batch.put(slot, request(slot, words, temperature=0.0), prompt)
    logits = torch.zeros(4, 64)
    logits[:, 9], logits[:, 7], logits[:, 3] = 3.0, 2.0, 1.0
    assert check(batch, logits, [0, 1, 2, 3])[0] == [7, 9, 7, 9]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_overflow_by_a_penalty_and_nan_behind_a_mask() -> None:
    batch = Batch(256)
    batch.put(0, request(0, repetition_penalty=5e-324), [3])
    batch.put(1, request(1, allowed_token_ids=[5]))
    logits = torch.full((2, 256), 100.0)
    logits[1, 200] = math.nan
    _, errors, _ = check(batch, logits, [0, 1])
    assert len(errors) == 2


def test_ties_take_the_lowest_id_across_chunks() -> None:
    batch = Batch(500)
    batch.put(0, request(0, temperature=0.0))
    logits = torch.zeros(1, 500)
    logits[0, 400], logits[0, 129], logits[0, 300] = 2.0, 2.0, 2.0
    assert check(batch, logits, [0])[0] == [129]
    assert check(batch, torch.tensor([[-0.0, 0.0, -0.0]]).repeat(1, 100), [0])[0] == [0]


def test_tokens_are_appended_to_the_histories() -> None:
    """Three steps on the device alone equal three steps with the CPU's bookkeeping."""
    batch, _ = mixed(256)
    slots = [3, 0, 6, 11]
    num_tokens = torch.tensor(batch.num_tokens, dtype=torch.int32)
    history, prompts = batch.history.clone(), torch.tensor(batch.prompt_len, dtype=torch.int32)
    sampler = DeviceSampler(16, 256, torch.device("cpu"))
    generator = torch.Generator().manual_seed(9)
    for step in range(3):
        logits = torch.randn(4, 256, generator=generator) * 3
        if step == 1:
            logits[1, 5] = math.nan
        expected = batch.sample(logits, slots).token_ids.clamp(min=0).tolist()
        sample = sampler.launch(
            logits, slots, torch.tensor(slots), batch.state, history, num_tokens, prompts
        )
        assert sample.results[:, 0].tolist() == expected
        for slot, token in zip(slots, expected, strict=True):
            batch.history[slot, batch.num_tokens[slot]] = token
            batch.num_tokens[slot] += 1
    assert torch.equal(history, batch.history)
    assert num_tokens.tolist() == batch.num_tokens


def test_launches_that_repeat_sample_what_stands_there_now() -> None:
    """CUDA graphs leave each step's logits at one address: more steps than results are kept for."""
    batch, slots = Batch(256), [2, 0, 1]
    for slot, params in enumerate(({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.6})):
        batch.put(slot, request(slot, **params))
    num_tokens = torch.tensor(batch.num_tokens, dtype=torch.int32)
    history, prompts = batch.history.clone(), torch.tensor(batch.prompt_len, dtype=torch.int32)
    sampler, rows = DeviceSampler(16, 256, torch.device("cpu")), torch.tensor(slots)
    generator, logits = torch.Generator().manual_seed(3), torch.empty(3, 256)
    for _ in range(2 * RESULTS_KEPT + 1):
        logits.copy_(torch.randn(3, 256, generator=generator) * 3)
        expected = batch.sample(logits, slots).token_ids.tolist()
        sample = sampler.launch(
            logits, slots, rows, batch.state, history, num_tokens, prompts, repeats=True
        )
        assert sample.collect().token_ids == expected
        for slot, token in zip(slots, expected, strict=True):
            batch.history[slot, batch.num_tokens[slot]] = token
            batch.num_tokens[slot] += 1
    assert torch.equal(history, batch.history)


def test_a_plan_is_kept_only_while_slots_and_settings_are_the_same() -> None:
    batch = Batch(256)
    batch.put(0, request(0, temperature=0.0))
    batch.put(1, request(0, temperature=0.0, allowed_token_ids=[7]))
    sampler = DeviceSampler(16, 256, torch.device("cpu"))
    num_tokens = torch.tensor(batch.num_tokens, dtype=torch.int32)
    logits = torch.zeros(1, 256)
    logits[0, EOS] = 1.0

    def token(slots: list[int]) -> int:
        rows, state = torch.tensor(slots), batch.state
        sample = sampler.launch(
            logits, slots, rows, state, batch.history, num_tokens, num_tokens, write_back=False
        )
        return int(sample.results[0, 0])

    slots = [0]
    assert token(slots) == EOS
    slots[0] = 1  # the caller may reuse its list
    assert token(slots) == 7
    batch.put(1, request(0, temperature=0.0, allowed_token_ids=[8]))
    assert token(slots) == 8


def test_empty_batch() -> None:
    assert launch(Batch(256), torch.empty(0, 256), []) == ([], {}, {})
