"""Every refusal names its field; every accepted value is in range for what comes after."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.input_processor import InputProcessor, _shortest_ends, split_seed
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams
from tests.cpu.engine.helpers import SPECIALS, byte_tokenizer, engine_config, token

TINY = byte_tokenizer([" the", " a", "the", "ab"])
VOCAB = TINY.vocab_size
EOS = TINY.eos_token_id


def processor(**settings) -> InputProcessor:
    return InputProcessor(engine_config(VOCAB, **settings), TINY)


def request(prompt="abc", settings=None, **params):
    """The one EngineRequest of a prompt."""
    (found,) = (
        processor(**(settings or {})).process("r", prompt, SamplingParams(**params)).engine_requests
    )
    return found


def refusal(prompt="abc", params=None, settings=None, priority=0) -> InvalidRequestError:
    """What `process` raises; `check` must raise the same."""
    inputs, params = processor(**(settings or {})), params or SamplingParams()
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process("r", prompt, params, priority)
    with pytest.raises(InvalidRequestError) as checked:
        inputs.process("id", prompt, params, priority)
    assert str(checked.value) == str(caught.value)
    return caught.value


def test_forms_of_a_prompt():
    ids = TINY.encode("abc")
    for prompt in ("abc", {"prompt": "abc"}, ids, tuple(ids), {"prompt_token_ids": ids}):
        assert request(prompt).prompt_token_ids == ids
    processed = processor().process(
        "r", {"prompt": "shown", "prompt_token_ids": [1, 2], "cache_salt": "s"}, SamplingParams()
    )
    assert processed.prompt_text == "shown"
    assert processed.engine_requests[0].prompt_token_ids == [1, 2]
    assert processed.engine_requests[0].cache_salt == "s"
    assert processor().process("r", [1], SamplingParams()).prompt_text is None


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**63, 1.5, True, None, "1"])
def test_prompt_token_ids_outside_the_vocabulary_are_refused(bad):
    """P05: negative, too large, float, bool."""
    for prompt in ([1, bad], {"prompt_token_ids": [bad]}):
        assert refusal(prompt).field == "prompt_token_ids"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([], "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({}, "prompt"),
        (None, "prompt"),
        (3, "prompt"),
        (b"abc", "prompt"),
        (bytearray(b"abc"), "prompt"),
        (memoryview(b"abc"), "prompt"),
        ({"prompt_token_ids": bytearray(b"abc")}, "prompt_token_ids"),
        (range(2**70), "prompt_token_ids"),
        ({"prompt_token_ids": range(2**70)}, "prompt_token_ids"),
        ({"prompt": 3}, "prompt"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": b"abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": 3}, "prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt"),
        ("a\ud800b", "prompt"),
    ],
)
def test_malformed_prompts_are_refused(prompt, field):
    assert refusal(prompt).field == field


def test_the_context_limit_rule():
    """P02: the prompt leaves room for one token; exactly the limit only with max_tokens=0."""
    for max_tokens in (1, None):
        assert request([1] * 63, max_tokens=max_tokens).max_tokens == 1
        error = refusal([1] * 64, SamplingParams(max_tokens=max_tokens, prompt_logprobs=1))
        assert error.field == "prompt"
        assert "64 prompt tokens and at least one output token" in error.message
    assert request([1] * 64, max_tokens=0, prompt_logprobs=1).max_tokens == 0
    error = refusal([1] * 65, SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert "65 prompt tokens do not fit into max_model_len=64" in error.message


def test_the_effective_limit_is_the_only_one():
    """P03: a limit that was cut to what the pool holds is the one that admission uses."""
    cut = InputProcessor(engine_config(VOCAB, max_model_len=1024), TINY)
    with pytest.raises(InvalidRequestError, match="max_model_len=1024"):
        cut.process("r", [1] * 2000, SamplingParams())
    (accepted,) = cut.process("r", [1] * 1000, SamplingParams(max_tokens=None)).engine_requests
    assert accepted.max_tokens == 24


def test_max_tokens_is_cut_to_the_room():
    assert request([1] * 60, max_tokens=None).max_tokens == 4
    assert request([1] * 60, max_tokens=100).max_tokens == 4
    assert request([1] * 60, max_tokens=3).max_tokens == 3


@pytest.mark.parametrize("key", [VOCAB, -1, "abc", "07", True, 1.0])
def test_logit_bias_keys_outside_the_vocabulary_are_refused(key):
    """P06: unknown ids; the other half (1e9, NaN) is refused by SamplingParams itself."""
    with pytest.raises(InvalidRequestError) as caught:
        processor().process("r", "a", SamplingParams(logit_bias={key: 1.0}))
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("value", [1e9, float("nan"), float("inf"), "1", None])
def test_logit_bias_values_out_of_range_are_refused(value):
    """P06."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(logit_bias={1: value})
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_token_id_lists_stay_inside_the_vocabulary(field):
    """P07: stop_token_ids are used as logit indices when EOS is masked."""
    error = refusal(params=SamplingParams(**{field: [VOCAB + 5]}, min_tokens=1))
    assert error.field == field
    assert request(**{field: [VOCAB - 4]}).sampling_params is not None


def test_allowed_token_ids_that_are_all_removed_are_refused():
    """P09: by single-token bad words, by min_tokens, by both; also the empty list."""
    the, ab = token(TINY, "the"), token(TINY, "ab")
    allowed = {"allowed_token_ids": [the]}
    for params, cause in (
        (SamplingParams(bad_words=["the"], **allowed), "bad_words"),
        (SamplingParams(stop_token_ids=[the], min_tokens=1, **allowed), "min_tokens"),
        (SamplingParams(allowed_token_ids=[EOS], min_tokens=1), "min_tokens"),
        (
            SamplingParams(
                allowed_token_ids=[the, ab], bad_words=["the"], stop_token_ids=[ab], min_tokens=1
            ),
            "min_tokens",
        ),
    ):
        error = refusal(params=params)
        assert error.field == "allowed_token_ids"
        assert cause in error.message
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(allowed_token_ids=[])
    assert caught.value.field == "allowed_token_ids"


def test_a_bias_of_minus_100_is_no_ban():
    """The least a bias may be, but what is left of a logit may still be the largest."""
    the = token(TINY, "the")
    assert request(allowed_token_ids=[the], logit_bias={the: -100.0})
    assert request(logit_bias=dict.fromkeys(range(VOCAB), -100.0))


def test_a_vocabulary_without_a_token_left_names_the_cause():
    everything = range(VOCAB)
    error = refusal(params=SamplingParams(stop_token_ids=everything, min_tokens=1))
    assert error.field == "min_tokens"
    assert request(stop_token_ids=everything)


def test_words_that_have_no_tokens_are_refused_by_their_own_name():
    """Whatever the tokenizers library says of the text, it is not the prompt."""
    vocab = {"a": 0, "b": 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=vocab, unk_token="?"))
    backend.decoder = tokenizers.decoders.ByteLevel()
    inputs = InputProcessor(engine_config(2), Tokenizer(backend))
    for prompt, params, field in (
        ("zz", SamplingParams(), "prompt"),
        ([1], SamplingParams(bad_words=["zz"]), "bad_words"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            inputs.process("r", prompt, params)
        assert caught.value.field == field


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), unique=True)


@given(SEQUENCES)
def test_bad_words_that_end_in_another_are_left_out(sequences):
    kept = _shortest_ends(sequences)
    assert kept == tuple(
        s for s in sequences if not any(s != t and s[-len(t) :] == t for t in sequences)
    )


def test_many_bad_words_take_linear_time():
    """Compared in pairs these would take hours."""
    many = [(i, i + 1, i + 2) for i in range(200_000)]
    assert len(_shortest_ends([*many, tuple(range(200_000))])) == 200_000


def test_allowed_token_ids_that_are_partly_removed_are_accepted():
    """P09: one token is left, at every position."""
    the = token(TINY, "the")
    for params in (
        {"allowed_token_ids": [the, 5], "bad_words": ["the"]},
        {"allowed_token_ids": [EOS], "min_tokens": 0},
        {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [the], "bad_words": ["the the"]},
    ):
        assert request(**params).sampling_params.allowed_token_ids


def test_bad_words_are_encoded_with_and_without_a_space():
    the, space_the, space_a = (token(TINY, w) for w in ("the", " the", " a"))
    assert request(bad_words=["the"]).bad_words_token_ids == ((the,), (space_the,))
    assert request(bad_words=["  the"]).bad_words_token_ids == ((the,), (space_the,))
    # Different lengths are no reason to drop a form: "ab" is one token, " ab" is two.
    ab = token(TINY, "ab")
    assert TINY.encode(" ab") == [space_a, ord("b")]
    assert request(bad_words=["ab"]).bad_words_token_ids == ((ab,), (space_a, ord("b")))
    # " x" is a space and "x": already covered by "x".
    assert request(bad_words=["x"]).bad_words_token_ids == ((ord("x"),),)
    assert refusal(params=SamplingParams(bad_words=["   "])).field == "bad_words"


def test_logprobs_are_limited_by_the_engine():
    for field in ("logprobs", "prompt_logprobs"):
        assert refusal(params=SamplingParams(**{field: 21})).field == field
        assert refusal(params=SamplingParams(**{field: -1})).field == field
        assert getattr(request(**{field: 20}).sampling_params, field) == 20
        assert getattr(request(**{field: 0}).sampling_params, field) == 0
        everything = request(settings={"max_logprobs": -1}, **{field: -1})
        assert getattr(everything.sampling_params, field) == VOCAB
        error = refusal(params=SamplingParams(**{field: VOCAB + 1}), settings={"max_logprobs": -1})
        assert error.field == field


@pytest.mark.parametrize("priority", [True, 1.0, "1", None])
def test_priority_is_an_integer(priority):
    assert refusal(priority=priority).field == "priority"


def test_other_arguments_are_checked():
    with pytest.raises(InvalidRequestError) as caught:
        processor().process("", "a", SamplingParams())
    assert caught.value.field == "request_id"
    with pytest.raises(InvalidRequestError) as caught:
        processor().process("r", "a", {"temperature": 0})
    assert caught.value.field == "sampling_params"


def test_eos_comes_from_model_and_tokenizer_unless_ignored():
    assert request(settings={"eos_token_ids": (5,)}).eos_token_ids == (5, EOS)
    assert request(ignore_eos=True).eos_token_ids == ()


def test_special_tokens_in_text_are_tokens():
    assert request("a" + SPECIALS[2]).prompt_token_ids == [
        ord("a"),
        TINY.backend.token_to_id(SPECIALS[2]),
    ]


def test_priority_needs_the_priority_policy():
    assert refusal(priority=1).field == "priority"


@pytest.mark.parametrize("when", ["x", True, float("nan"), float("inf"), 10**400, -(10**400)])
def test_arrival_time_is_a_finite_number(when):
    """The metrics add it up: one that is not would spoil them for good."""
    with pytest.raises(InvalidRequestError, match="arrival_time"):
        processor().process("r", "abc", SamplingParams(), arrival_time=when)
    (child,) = processor().process("r", "a", SamplingParams(), arrival_time=3).engine_requests
    assert type(child.arrival_time) is float


def test_huge_integers_are_refused_by_name():
    """str() of an int with more than 4,300 digits raises: an error text must not."""
    huge = 10**5000
    assert refusal(prompt=[huge]).field == "prompt_token_ids"
    for name in ("logprobs", "prompt_logprobs"):
        assert refusal(params=SamplingParams(**{name: huge})).field == name
    for name, value in (("stop_token_ids", [huge]), ("logit_bias", {huge: 1.0})):
        assert refusal(params=SamplingParams(**{name: value})).field == name


def test_n_completions_share_the_prompt_and_split_the_seed():
    processed = processor(policy="priority").process(
        "r", "abc", SamplingParams(n=3, seed=7, prompt_logprobs=1), priority=2, arrival_time=1.5
    )
    children = processed.engine_requests
    assert [c.request_id for c in children] == ["r/0", "r/1", "r/2"]
    assert [c.seed for c in children] == [split_seed(7, i) for i in range(3)]
    assert len({c.seed for c in children}) == 3
    assert all((c.priority, c.arrival_time) == (2, 1.5) for c in children)
    assert [c.sampling_params.prompt_logprobs for c in children] == [1, None, None]


def test_the_first_completion_is_the_same_for_any_n():
    """A seeded request's stream depends on its seed and index only."""
    alone = request(seed=7)
    assert alone.request_id == "r"
    many = processor().process("x", "abc", SamplingParams(n=5, seed=7)).engine_requests
    assert many[0].seed == alone.seed


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed():
    def seeds(engine_seed):
        inputs = processor(seed=engine_seed)
        return [
            inputs.process(str(i), "a", SamplingParams()).engine_requests[0].seed for i in range(50)
        ]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 100
    assert not {split_seed(s, 0) for s in range(50)} & set(seeds(0)), "a seed of the caller's"


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 16383))
def test_seeds_are_64_bits(seed, index):
    assert 0 <= split_seed(seed, index) < 2**64
    assert 0 <= request(seed=seed).seed < 2**64


def test_without_a_tokenizer_only_ids_work():
    inputs = InputProcessor(engine_config(VOCAB, eos_token_ids=(3,)), None)
    (accepted,) = inputs.process("r", [1, 2], SamplingParams()).engine_requests
    assert accepted.eos_token_ids == (3,)
    for prompt, params, field in (
        ("abc", SamplingParams(), "prompt"),
        ([1], SamplingParams(stop="a"), "stop"),
        ([1], SamplingParams(bad_words=["a"]), "bad_words"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            inputs.process("r", prompt, params)
        assert caught.value.field == field


def test_tokenizer_larger_than_the_model_is_caught():
    """An added token the model has no row for would read past the embedding."""
    inputs = InputProcessor(engine_config(VOCAB - 1), TINY)
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process("r", SPECIALS[2], SamplingParams())
    assert caught.value.field == "prompt"
