"""Streaming text and stop strings against an oracle that looks at the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.tokenizer import Tokenizer
from octavo.sampling_params import SamplingParams
from tests.cpu.engine.helpers import SPECIALS, byte_tokenizer, token

TEXTS = [
    "Hello, world",
    "👨‍👩‍👧 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "안녕하세요 세계, 한국어 문장입니다",
    "日本語と中文、mixed  with   spaces\n\n\tand tabs",
    "e\u0301 combining, zero\u200dwidth, \U0001f468\u200d\U0001f4bb",
]
WORDS = ("DEF", "GH", "HI", "ab", "abab", "the ", " a", "é", "😀")
TINY = byte_tokenizer(WORDS)


def stream(
    tokenizer: Tokenizer,
    groups: list[list[int]],
    params: SamplingParams,
    prompt: tuple[int, ...] = (),
) -> tuple[list[str], IncrementalDetokenizer]:
    """The deltas of an update a group, the last one finished."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, params)
    deltas = []
    for i, group in enumerate(groups):
        deltas.append(detokenizer.update(group, finished=i == len(groups) - 1))
        if detokenizer.stop_string is not None:
            break
    assert "".join(deltas) == detokenizer.text
    return deltas, detokenizer


def split(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Consecutive groups, some maybe empty."""
    edges = sorted({0, len(token_ids), *(c % (len(token_ids) + 1) for c in cuts)})
    return [token_ids[a:b] for a, b in pairwise(edges)] or [[]]


def oracle(
    tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams
) -> tuple[str, str | None, int]:
    """Text, stop string and token count by looking at the whole text again and again."""
    text = tokenizer.decode(token_ids, params.skip_special_tokens)
    for end in range(1, len(text) + 1):
        matches = [s for s in params.stop or () if text[:end].endswith(s)]
        if not matches:
            continue
        owner = next(
            k
            for k in range(len(token_ids) + 1)
            if tokenizer.decode(token_ids[:k], params.skip_special_tokens).startswith(text[:end])
        )
        if owner > params.min_tokens:
            stop = max(matches, key=len)
            kept = end if params.include_stop_str_in_output else end - len(stop)
            return text[:kept], stop, owner
    return text, None, len(token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_one_token_a_step_equals_one_full_decode(smollm2, text):
    """D07: emoji, Czech, Korean, ZWJ; no replacement character, no split character."""
    ids = smollm2.encode(text)
    deltas, _ = stream(smollm2, [[i] for i in ids], SamplingParams())
    assert "".join(deltas) == text == smollm2.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@given(st.data())
def test_any_grouping_of_any_bytes_equals_one_full_decode(data):
    """D07: random groupings of random tokens, invalid UTF-8 included."""
    ids = data.draw(st.lists(st.integers(0, TINY.vocab_size - 1), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=20))
    skip = data.draw(st.booleans())
    deltas, _ = stream(TINY, split(ids, cuts), SamplingParams(skip_special_tokens=skip))
    assert "".join(deltas) == TINY.decode(ids, skip)
    assert TINY.decode(ids, skip) == TINY.backend.decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet=st.sampled_from("aé😀한\u200d́ \n"), max_size=30))
def test_no_replacement_character_while_a_character_is_incomplete(text):
    """D07: bytes one by one; U+FFFD never appears in valid text."""
    ids = list(text.encode())
    deltas, _ = stream(TINY, [[i] for i in ids], SamplingParams())
    assert "".join(deltas) == text


def test_a_character_cut_off_at_the_end_becomes_one_replacement_character():
    """D07: only what is truly truncated, and only at the end."""
    ids = list("a😀".encode())[:-1]
    deltas, _ = stream(TINY, [[i] for i in ids], SamplingParams())
    assert deltas == ["a", "", "", "\ufffd"]


def test_permanently_invalid_bytes_do_not_block_the_stream():
    """A model stuck in bytes that can never be UTF-8 is seen doing it."""
    detokenizer = IncrementalDetokenizer(TINY, (), SamplingParams())
    assert [detokenizer.update([0xFF]) for _ in range(100)] == ["\ufffd"] * 100
    assert detokenizer.update([ord("x")]) == "x"


def test_a_character_begun_by_the_prompt_is_completed_by_the_output():
    prompt = (ord("a"), *"😀".encode()[:2])
    _, detokenizer = stream(TINY, [list("😀!".encode()[2:])], SamplingParams(), prompt)
    assert detokenizer.text == "😀!"


def test_a_complete_prompt_leaves_nothing_behind():
    _, detokenizer = stream(TINY, [[ord("b")]], SamplingParams(), tuple("x😀".encode()))
    assert detokenizer.text == "b"


def test_special_tokens_are_skipped_unless_asked_for():
    end = TINY.backend.token_to_id(SPECIALS[1])
    ids = [ord("a"), end, ord("b")]
    assert stream(TINY, [ids], SamplingParams())[1].text == "ab"
    assert stream(TINY, [ids], SamplingParams(skip_special_tokens=False))[1].text == "a<|end|>b"


def test_the_stop_token_stays_out_of_the_text_unless_included():
    def text(**settings):
        detokenizer = IncrementalDetokenizer(TINY, (), SamplingParams(**settings))
        detokenizer.update([ord("a"), ord("b")], stop_token=True, finished=True)
        assert detokenizer.num_tokens == 2
        return detokenizer.text

    assert text() == "a"
    assert text(include_stop_str_in_output=True) == "ab"


def test_start_of_a_stop_string_is_never_streamed():
    """D01: tokens 'DEF', 'G', 'HI', 'J' and stop 'DEFGHIJ': nothing leaks."""
    groups = [[token(TINY, "DEF")], [ord("G")], [token(TINY, "HI")], [ord("J")]]
    deltas, detokenizer = stream(TINY, groups, SamplingParams(stop="DEFGHIJ"))
    assert deltas == ["", "", "", ""]
    assert (detokenizer.stop_string, detokenizer.num_tokens) == ("DEFGHIJ", 4)


def test_a_false_start_is_released():
    """D01: the held text comes out when the match fails."""
    groups = [[token(TINY, "DEF")], [ord("G")], [ord("x")]]
    assert stream(TINY, groups, SamplingParams(stop="DEFGHIJ"))[0] == ["", "", "DEFGx"]


@pytest.mark.parametrize(
    ("include", "text"), [(False, ""), (True, "DE")], ids=["cut before", "cut after"]
)
def test_stop_string_that_ends_inside_a_token(include, text):
    """D02: stop 'DE' when the token is 'DEF'."""
    params = SamplingParams(stop="DE", include_stop_str_in_output=include)
    _, detokenizer = stream(TINY, [[token(TINY, "DEF")]], params)
    assert (detokenizer.text, detokenizer.stop_string) == (text, "DE")


def test_stop_string_across_a_space():
    """D02: 'x y' arrives as 'x', ' ', 'y'."""
    groups = [[ord(c)] for c in "ax yb"]
    deltas, detokenizer = stream(TINY, groups, SamplingParams(stop="x y"))
    assert deltas == ["a", "", "", ""]
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 4)


def test_stop_string_equal_to_the_whole_output():
    """D02: nothing is left of the text."""
    ids = list(b"STOP")
    assert stream(TINY, [ids], SamplingParams(stop="STOP"))[1].text == ""
    params = SamplingParams(stop="STOP", include_stop_str_in_output=True)
    assert stream(TINY, [ids], params)[1].text == "STOP"


def test_only_a_true_prefix_is_held_back():
    """D04: a nine-character stop holds nothing of text that cannot begin it."""
    groups = [[ord(c)] for c in "<think>ok</think>"]
    deltas, _ = stream(TINY, groups, SamplingParams(stop="</answer>"))
    assert deltas[:9] == ["", "<t", "h", "i", "n", "k", ">", "o", "k"]
    assert deltas[9:12] == ["", "", "</t"]


def test_the_end_releases_what_was_held():
    """D04: the flush goes through the same search, and says that no stop string was found."""
    groups = [[ord(c)] for c in "ok</ans"]
    deltas, detokenizer = stream(TINY, groups, SamplingParams(stop="</answer>"))
    assert deltas == ["o", "k", "", "", "", "", "</ans"]
    assert detokenizer.stop_string is None


def test_the_first_completed_stop_string_wins_then_the_longest():
    assert stream(TINY, [list(b"abcdef")], SamplingParams(stop=["abcdef", "cd"]))[1].text == "ab"
    _, detokenizer = stream(TINY, [list(b"xabc")], SamplingParams(stop=["bc", "abc"]))
    assert (detokenizer.text, detokenizer.stop_string) == ("x", "abc")


def test_stop_strings_sleep_for_min_tokens():
    """The token that completes it must come after the first min_tokens."""
    ids = list(b"a.b.c.")
    _, detokenizer = stream(TINY, [[i] for i in ids], SamplingParams(stop=".", min_tokens=2))
    assert (detokenizer.text, detokenizer.num_tokens) == ("a.b", 4)


def test_a_sleeping_match_is_not_held_back():
    """D04: '.' cannot become a longer stop string, so it is shown at once."""
    params = SamplingParams(stop=[".", "...!"], min_tokens=10)
    assert stream(TINY, [[i] for i in b"a.b"], params)[0] == ["a", "", ".b"]
    params = SamplingParams(stop=".", min_tokens=10)
    assert stream(TINY, [[i] for i in b"a.b"], params)[0] == ["a", ".", "b"]


_stop = st.text(alphabet="abDEFé😀 ", min_size=1, max_size=5)


@given(
    ids=st.lists(
        st.sampled_from([*b"abDEFGH ", *"é😀".encode(), *range(256, TINY.vocab_size)]), max_size=30
    ),
    cuts=st.lists(st.integers(0, 30), max_size=15),
    stops=st.lists(_stop, min_size=1, max_size=4),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
@example(ids=list(b"aab"), cuts=[1, 2], stops=["ab"], min_tokens=0, include=False)
def test_stop_strings_equal_the_oracle_for_any_grouping(ids, cuts, stops, min_tokens, include):
    """D01, D02, D04: text, stop string and token count depend on the tokens only."""
    params = SamplingParams(
        stop=stops, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=include
    )
    _, detokenizer = stream(TINY, split(ids, cuts), params)
    found = (detokenizer.text, detokenizer.stop_string, detokenizer.num_tokens)
    assert found == oracle(TINY, ids, params)


@given(st.text(alphabet="abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=6)))
def test_what_is_held_back_is_the_longest_true_prefix(text, stops):
    """D04: at every moment, released + held is the text, and held can still become a stop string."""
    detokenizer = IncrementalDetokenizer(TINY, (), SamplingParams(stop=stops or None))
    for end, byte in enumerate(text.encode(), 1):
        detokenizer.update([byte])
        if detokenizer.stop_string is not None:
            return
        held = text[len(detokenizer.text) : end]
        assert detokenizer.text + held == text[:end]
        prefixes = {s[:n] for s in stops for n in range(len(s))}
        assert held == max((p for p in prefixes | {""} if text[:end].endswith(p)), key=len)


def test_work_per_token_does_not_grow():
    """Each token's bytes are looked up once, whatever came before, in valid and invalid text."""

    class Counting:
        special_token_ids = TINY.special_token_ids
        calls = 0

        def token_bytes(self, token_id):
            self.calls += 1
            return TINY.token_bytes(token_id)

    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting, (), SamplingParams(stop=["aaab" * 10]))
    for i in range(5000):
        detokenizer.update([0xE2 if i % 2 else 0xFF])
    for _ in range(5000):
        detokenizer.update([ord("a")])
        assert len(detokenizer._held) < 40
    assert counting.calls == 10_000
