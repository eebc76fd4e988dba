"""What SamplingParams accepts and refuses, without a model."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
REFUSED: list[tuple[str, list[Any]]] = [
    ("n", [0, -1, 16385, 1.0, True, "2", None]),
    ("temperature", [-0.1, -1, NAN, INF, -INF, "1", None, True, 10**400]),
    ("top_p", [-0.1, 1.0001, 2, NAN, INF, "0.5", None, False]),
    ("top_k", [-2, 1.5, NAN, "5", None, True]),
    ("min_p", [-0.1, 1.1, NAN, None]),
    ("presence_penalty", [-2.1, 2.1, NAN, INF, None]),
    ("frequency_penalty", [-2.1, 2.1, NAN, INF, None]),
    ("repetition_penalty", [0, 0.0, -1, NAN, INF, None]),
    ("seed", [-(2**63) - 1, 2**64, 1.0, "1", True]),
    ("max_tokens", [-1, 1.0, "5", True]),
    ("min_tokens", [-1, 17, 1.0, None]),
    ("stop", [[""], "", [1], 5, [None], ["ok", b"no"]]),
    ("stop_token_ids", [[-1], [1.5], ["1"], [True], 5, "12"]),
    ("logprobs", [-2, 1.5, "1", True]),
    ("prompt_logprobs", [-2, 1.5, "1", True]),
    ("allowed_token_ids", [[], [-1], [1.5], ["1"], [True], 5]),
    ("bad_words", ["word", [""], [5], 5]),
    ("ignore_eos", [1, None, "true"]),
    ("include_stop_str_in_output", [0]),
    ("skip_special_tokens", [0]),
    ("detokenize", ["no"]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED for value in values]
)
def test_out_of_range_names_the_field(field: str, value: Any) -> None:
    """P13 and P15 among them: a negative or NaN temperature, top_p over 1, top_k under -1."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "bias",
    [
        *({key: 1.0} for key in (-1, "abc", "07", 1.5, True, None)),
        *({1: value} for value in (1e9, NAN, INF, -100.5, None, "2")),
        [(1, 2.0)],
        5,
    ],
)
def test_p06_logit_bias_is_refused(bias: Any) -> None:
    """P06: keys that are no token ids, values that are not in [-100, 100]."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("token_id", [-1, 1.5, True, None])
def test_p07_stop_token_ids_are_refused(token_id: Any) -> None:
    """P07: an id that could reach another row's logits; the upper end needs the vocabulary."""
    with pytest.raises(InvalidRequestError):
        SamplingParams(stop_token_ids=[token_id], min_tokens=1)


def test_p09_empty_allowed_token_ids_are_refused() -> None:
    """P09: nothing could be sampled."""
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[])


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-12, 5e-324])
def test_p13_tiny_temperature_is_greedy(temperature: float) -> None:
    """P13."""
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0}, {"top_p": 1e-9}, {"top_p": 1}, {"top_k": -1}, {"top_k": 0}, {"top_k": 2**70}],
)
def test_p15_ends_of_the_ranges_are_accepted(params: dict[str, Any]) -> None:
    """P15: 1.0 of top_p and -1 or 0 of top_k are what clients send for off."""
    assert dataclasses.asdict(SamplingParams(**params)).items() >= params.items()


def test_lists_become_tuples_and_one_stop_string_a_list() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], bad_words=["a"], logit_bias={1: 2})
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ("a",)
    assert params == pickle.loads(pickle.dumps(params))


def test_callers_lists_are_not_shared() -> None:
    ids, bias = [1, 2], {1: 2.0}
    params = SamplingParams(allowed_token_ids=ids, logit_bias=bias)
    ids.clear()
    bias.clear()
    assert params.allowed_token_ids == (1, 2)
    assert params.logit_bias == {1: 2.0}


def test_combinations_that_contradict_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequestError, match="stop"):
        SamplingParams(stop=["x"], detokenize=False)
    SamplingParams(min_tokens=100, max_tokens=None)


def test_seed_minus_one_means_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=0).seed == 0
    for seed in (-(2**63), 2**64 - 1):
        assert SamplingParams(seed=seed).seed == seed


def test_error_texts_stay_short_and_never_fail() -> None:
    """An integer over 4,300 digits cannot be printed; a long value is not echoed whole."""
    for field, value in (("temperature", 10**5000), ("seed", 10**5000), ("top_k", "k" * 10**6)):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert len(str(caught.value)) < 250


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_names_and_defaults_follow_vllm() -> None:
    """Users' scripts carry over: the same names mean the same and default to the same."""
    defaults = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
    }
    assert dataclasses.asdict(SamplingParams()).items() >= defaults.items()


def test_lists_without_end_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids: must not have more than"):
        SamplingParams(allowed_token_ids=range(10**12))
