"""Core outputs to RequestOutputs: kinds, completions, scores, stop strings, late and odd news."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.scheduler_output import EngineCoreOutput
from octavo.engine.input_processor import InputProcessor
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import InvalidRequestError
from octavo.outputs import FinishReason, Logprob, RequestOutputKind, TokenLogprobs
from octavo.sampling_params import SamplingParams
from tests.cpu.engine.helpers import byte_tokenizer, engine_config

TINY = byte_tokenizer(["DEF", "HI"])
INPUTS = InputProcessor(engine_config(TINY.vocab_size, max_model_len=4096), TINY)
KINDS = list(RequestOutputKind)
FLOAT_MIN = -3.4028234663852886e38


def add(outputs: OutputProcessor, request_id="r", prompt="abc", kind=None, **params):
    processed = INPUTS.process(
        request_id, prompt, SamplingParams(max_tokens=None, **params), arrival_time=100.0
    )
    children = processed.engine_requests
    outputs.add(outputs.prepare(request_id, processed.prompt_text, children, kind))


def news(ids=(), request_id="r", reason=None, **more) -> EngineCoreOutput:
    ids = list(ids.encode()) if isinstance(ids, str) else list(ids)
    return EngineCoreOutput(request_id, ids, finish_reason=reason, **more)


def scores(token_id: int, logprob=-1.0, rank=1, top=()) -> TokenLogprobs:
    return TokenLogprobs([token_id, *(i for i, _ in top)], [logprob, *(x for _, x in top)], rank)


def test_cumulative_outputs_hold_everything_so_far():
    outputs = OutputProcessor(TINY)
    add(outputs)
    first = outputs.process([news("he")])[0][0]
    second = outputs.process([news("y", reason=FinishReason.LENGTH)])[0][0]
    assert [o.outputs[0].text for o in (first, second)] == ["he", "hey"]
    assert [o.outputs[0].token_ids for o in (first, second)] == [list(b"he"), list(b"hey")]
    assert (first.finished, second.finished) == (False, True)
    assert second.outputs[0].finish_reason is FinishReason.LENGTH
    assert (second.prompt, second.prompt_token_ids) == ("abc", list(b"abc"))
    assert not outputs.num_requests


def test_delta_outputs_hold_what_is_new():
    outputs = OutputProcessor(TINY)
    add(outputs, kind=RequestOutputKind.DELTA, logprobs=0)
    found = []
    for ids in ("he", "y", "😀"):
        step = news(ids, logprobs=[scores(b) for b in ids.encode()])
        found += outputs.process([step])[0]
    found += outputs.process([news(reason=FinishReason.ABORT)])[0]
    deltas = [o.outputs[0] for o in found]
    assert [d.text for d in deltas] == ["he", "y", "😀", ""]
    assert [d.token_ids for d in deltas] == [list(b"he"), list(b"y"), list("😀".encode()), []]
    assert [len(d.logprobs) for d in deltas] == [2, 1, 4, 0]
    assert [d.cumulative_logprob for d in deltas] == [-2.0, -3.0, -7.0, -7.0]
    assert found[-1].finished


def test_final_only_outputs_come_once():
    outputs = OutputProcessor(TINY)
    add(outputs, kind=RequestOutputKind.FINAL_ONLY)
    assert outputs.process([news("he")]) == ([], [])
    (final,) = outputs.process([news("y", reason=FinishReason.STOP)])[0]
    assert final.outputs[0].text == "he", "the stop token is not text"
    assert final.outputs[0].token_ids == list(b"hey")


def test_output_kind_defaults_to_the_sampling_params():
    outputs = OutputProcessor(TINY)
    add(outputs, output_kind=RequestOutputKind.FINAL_ONLY)
    assert outputs.process([news("he")])[0] == []


def test_completions_come_in_index_order_under_their_request():
    outputs = OutputProcessor(TINY)
    add(outputs, n=3)
    (found,) = outputs.process([news("x", "r/2"), news("y", "r/0")])[0]
    assert [(o.index, o.text) for o in found.outputs] == [(0, "y"), (1, ""), (2, "x")]
    assert found.request_id == "r"
    for i in (2, 0, 1):
        assert not found.finished
        (found,) = outputs.process([news("!", f"r/{i}", FinishReason.LENGTH)])[0]
    assert found.finished
    assert [o.text for o in found.outputs] == ["y!", "!", "x!"]


def test_deltas_of_completions_name_only_those_with_news():
    outputs = OutputProcessor(TINY)
    add(outputs, n=3, kind=RequestOutputKind.DELTA)
    (found,) = outputs.process([news("x", "r/2"), news("y", "r/0")])[0]
    assert [(o.index, o.text) for o in found.outputs] == [(0, "y"), (2, "x")]


def test_final_output_waits_for_all_completions():
    outputs = OutputProcessor(TINY)
    add(outputs, n=2, kind=RequestOutputKind.FINAL_ONLY)
    assert outputs.process([news("x", "r/1", FinishReason.LENGTH)]) == ([], [])
    (final,) = outputs.process([news("y", "r/0", FinishReason.STOP)])[0]
    assert [o.finish_reason for o in final.outputs] == [FinishReason.STOP, FinishReason.LENGTH]


def test_a_stop_string_ends_the_request_here_and_asks_the_core_to_abort():
    """D01: tokens after the one that completed it are dropped, with their scores."""
    outputs = OutputProcessor(TINY)
    add(outputs, stop="lo", logprobs=0)
    step = news("hello you", logprobs=[scores(b) for b in b"hello you"])
    (found,), to_abort = outputs.process([step])
    output = found.outputs[0]
    assert to_abort == ["r"]
    assert (output.text, output.token_ids) == ("hel", list(b"hello"))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "lo")
    assert (len(output.logprobs), output.cumulative_logprob) == (5, -5.0)
    assert found.finished
    assert outputs.process([news("late")]) == ([], []), "overlapped tokens arrive late"


def test_a_stop_string_in_the_last_tokens_wins_over_the_cores_reason():
    """No abort is needed: the core has ended it already."""
    outputs = OutputProcessor(TINY)
    add(outputs, stop="lo")
    (found,), to_abort = outputs.process([news("hello", reason=FinishReason.LENGTH)])
    assert to_abort == []
    assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("stop", "lo")


def test_one_completion_may_stop_while_the_others_run():
    outputs = OutputProcessor(TINY)
    add(outputs, n=2, stop="!")
    (found,), to_abort = outputs.process([news("a!", "r/1"), news("b", "r/0")])
    assert to_abort == ["r/1"]
    assert not found.finished
    assert [o.text for o in found.outputs] == ["b", "a"]


@pytest.mark.parametrize("kind", KINDS)
def test_held_text_comes_out_at_the_end(kind):
    """D01, D04: streamed and not streamed text are the same."""
    outputs = OutputProcessor(TINY)
    add(outputs, stop="</answer>", kind=kind)
    found = []
    for byte in b"ok</ans":
        found += outputs.process([news([byte])])[0]
    found += outputs.process([news(reason=FinishReason.LENGTH)])[0]
    texts = [o.outputs[0].text for o in found]
    assert ("".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]) == "ok</ans"
    assert not any("<" in text for text in texts[:-1])


def test_stop_token_is_reported_and_kept_out_of_the_text():
    outputs = OutputProcessor(TINY)
    add(outputs, stop_token_ids=[ord("!")])
    step = news("hi!", reason=FinishReason.STOP, stop_reason=ord("!"))
    output = outputs.process([step])[0][0].outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == ("hi", list(b"hi!"), ord("!"))


@given(st.data())
def test_deltas_join_to_the_cumulative_output(data):
    """Any tokens in any groups: the three kinds tell the same story."""
    ids = data.draw(st.lists(st.integers(0, TINY.vocab_size - 1), min_size=1, max_size=20))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))
    params = {"stop": data.draw(st.lists(st.text("ab0\ufffd", min_size=1, max_size=3), max_size=2))}
    ends = []
    for kind in KINDS:
        outputs = OutputProcessor(TINY)
        add(outputs, kind=kind, logprobs=0, **params)
        found, rest = [], list(ids)
        for size in sizes:
            step, rest = rest[:size], rest[size:]
            reason = None if rest else FinishReason.LENGTH
            found += outputs.process(
                [news(step, reason=reason, logprobs=[scores(i) for i in step])]
            )[0]
        assert sum(o.finished for o in found) == 1
        assert found[-1].finished
        last = found[-1].outputs[0]
        if kind is RequestOutputKind.DELTA:
            last.text = "".join(o.outputs[0].text for o in found)
            last.token_ids = [i for o in found for i in o.outputs[0].token_ids]
            last.logprobs = [i for o in found for i in o.outputs[0].logprobs]
        ends.append(last)
    assert ends[0] == ends[1] == ends[2]


def test_outputs_do_not_change_after_they_were_given():
    outputs = OutputProcessor(TINY)
    add(outputs, logprobs=0)
    (first,) = outputs.process([news("a", logprobs=[scores(97)])])[0]
    outputs.process([news("b", logprobs=[scores(98)])])
    assert (first.outputs[0].token_ids, len(first.outputs[0].logprobs)) == ([97], 1)


def test_logprobs_have_the_sampled_token_first_each_id_once():
    """L01: -inf arrives as the lowest finite float and stays it."""
    outputs = OutputProcessor(TINY)
    add(outputs, logprobs=2)
    chosen_in_top = scores(98, -0.5, 2, [(97, -0.25), (98, -0.5)])
    outside_top = scores(0xFF, -9.0, 77, [(97, -0.25), (98, FLOAT_MIN)])
    (found,) = outputs.process([news([98, 0xFF], logprobs=[chosen_in_top, outside_top])])[0]
    first, second = found.outputs[0].logprobs
    assert list(first.items()) == [(98, Logprob(-0.5, 2, "b")), (97, Logprob(-0.25, 1, "a"))]
    assert list(second.items()) == [
        (0xFF, Logprob(-9.0, 77, "\ufffd")),
        (97, Logprob(-0.25, 1, "a")),
        (98, Logprob(FLOAT_MIN, 2, "b")),
    ]
    assert found.outputs[0].cumulative_logprob == -9.5


def test_no_logprobs_unless_asked():
    outputs = OutputProcessor(TINY)
    add(outputs)
    (found,) = outputs.process([news("a", logprobs=[scores(97)])])[0]
    assert found.outputs[0].logprobs is None
    assert found.outputs[0].cumulative_logprob is None
    assert found.prompt_logprobs is None


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_gather_over_chunks(kind):
    """L03, L04: one entry a prompt token, the first None; told once with deltas."""
    outputs = OutputProcessor(TINY)
    add(outputs, prompt="abcd", prompt_logprobs=0, kind=kind)
    assert outputs.process([news(prompt_logprobs=[scores(98)])]) == ([], [])
    found = outputs.process([news("x", prompt_logprobs=[scores(99), scores(100)])])[0]
    found += outputs.process([news("y", reason=FinishReason.LENGTH)])[0]
    told = [o.prompt_logprobs for o in found]
    expected = [None, *({i: Logprob(-1.0, 1, chr(i))} for i in (98, 99, 100))]
    if kind is RequestOutputKind.DELTA:
        assert told == [expected, None]
    else:
        assert told == [expected] * len(found)


def test_prompt_scores_without_output():
    """L04: max_tokens 0 ends with scores and no token."""
    outputs = OutputProcessor(TINY)
    add(outputs, prompt="ab", prompt_logprobs=0)
    step = news(reason=FinishReason.LENGTH, prompt_logprobs=[scores(98)])
    (found,) = outputs.process([step])[0]
    assert (len(found.prompt_logprobs), found.outputs[0].token_ids) == (2, [])
    assert found.metrics.ttft is None


def test_prompt_scores_wait_until_they_are_complete():
    """A second completion may be faster than the first, which scores the prompt."""
    outputs = OutputProcessor(TINY)
    add(outputs, prompt="abc", prompt_logprobs=0, n=2, kind=RequestOutputKind.DELTA)
    outputs.process([news(request_id="r/0", prompt_logprobs=[scores(98)])])
    (early,) = outputs.process([news("x", "r/1")])[0]
    assert early.prompt_logprobs is None
    (later,) = outputs.process([news("y", "r/0", prompt_logprobs=[scores(99)])])[0]
    assert len(later.prompt_logprobs) == 3


def test_metrics_of_a_request():
    outputs = OutputProcessor(TINY)
    add(outputs)
    first = news("ab", first_scheduled_time=100.5, num_cached_tokens=2, num_preemptions=1)
    outputs.process([first], now=101.0)
    last = news("c", reason=FinishReason.LENGTH, first_scheduled_time=100.5, num_preemptions=1)
    last.num_cached_tokens = 2
    (found,) = outputs.process([last], now=103.0)[0]
    metrics = found.metrics
    assert (metrics.queue_time, metrics.ttft, metrics.tpot, metrics.e2e) == (0.5, 1.0, 1.0, 3.0)
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (3, 1)
    assert found.num_cached_tokens == 2
    totals = outputs.metrics.snapshot()
    assert (totals["prompt_tokens"], totals["generation_tokens"]) == (3, 3)
    assert totals["completions"]["length"] == 1
    assert totals["histograms"]["ttft_seconds"]["sum"] == 1.0


def test_abort_gives_back_what_there_is():
    outputs = OutputProcessor(TINY)
    add(outputs, n=2, stop="bc", kind=RequestOutputKind.DELTA)
    outputs.process([news("ab", "r/0"), news("x", "r/1", FinishReason.LENGTH)])
    (found,), to_abort = outputs.abort(["r", "r", "unknown"])
    assert to_abort == ["r/0"]
    assert found.finished
    assert [(o.text, o.finish_reason) for o in found.outputs] == [("b", FinishReason.ABORT)]
    assert outputs.process([news("c", "r/0")]) == ([], [])
    assert outputs.abort(["r"]) == ([], [])
    assert not outputs.num_requests


def test_errors_end_one_completion():
    outputs = OutputProcessor(TINY)
    add(outputs, "bad")
    add(outputs, "good")
    found, to_abort = outputs.process(
        [news("x", "bad", FinishReason.ERROR, error="NaN in the logits"), news("y", "good")]
    )
    assert to_abort == []
    assert [(o.request_id, o.finished) for o in found] == [("bad", True), ("good", False)]
    assert found[0].outputs[0].error == "NaN in the logits"
    assert found[0].outputs[0].finish_reason is FinishReason.ERROR


def test_a_bug_in_one_request_leaves_the_others_alone(caplog):
    """Scores that were asked for and do not come are our bug: only this request fails."""
    outputs = OutputProcessor(TINY)
    add(outputs, "bad", logprobs=1)
    add(outputs, "good")
    found, to_abort = outputs.process([news("x", "bad"), news("y", "good")])
    assert to_abort == ["bad"]
    assert [o.outputs[0].finish_reason for o in found] == [FinishReason.ERROR, None]
    assert "no scores" in found[0].outputs[0].error
    assert "bad" in caplog.text


def fails(*_, **__):
    raise ValueError("said no")


def test_a_failure_to_count_a_request_ends_nobody(monkeypatch, caplog):
    """Metrics are the last thing done for a request: it and the others are delivered all the same."""
    outputs = OutputProcessor(TINY)
    for name in ("a", "b", "c"):
        add(outputs, name)
    monkeypatch.setattr(outputs.metrics, "record_request", fails)
    (a, b), _ = outputs.process([news("x", "a", FinishReason.LENGTH), news("y", "b")])
    assert [(a.finished, b.finished, b.outputs[0].text)] == [(True, False, "y")]
    monkeypatch.setattr(outputs.metrics, "record_completion", fails)
    (b, c), to_abort = outputs.abort(["b", "c"])
    assert (b.finished, c.finished, to_abort) == (True, True, ["b", "c"])
    assert outputs.num_requests == 0
    assert "said no" in caplog.text


def test_a_failed_output_that_cannot_be_counted_hits_no_neighbour(monkeypatch):
    outputs = OutputProcessor(TINY)
    add(outputs, "bad", logprobs=1)
    add(outputs, "good")
    monkeypatch.setattr(outputs.metrics, "record_request", fails)
    (bad, good), to_abort = outputs.process([news("x", "bad"), news("y", "good")])
    assert (to_abort, bad.outputs[0].finish_reason) == (["bad"], FinishReason.ERROR)
    assert good.outputs[0].text == "y"


def test_an_abort_that_fails_for_one_request_reaches_the_others():
    outputs = OutputProcessor(TINY)
    add(outputs, "bad")
    add(outputs, "good")
    outputs._completions["bad"].detokenizer.update = fails
    (bad, good), to_abort = outputs.abort(["bad", "good"])
    assert to_abort == ["bad", "good"]
    assert (bad.outputs[0].finish_reason, good.outputs[0].finish_reason) == ("error", "abort")
    assert not outputs.num_requests


@pytest.mark.parametrize("last", [False, True])
def test_an_output_that_cannot_be_made_hits_no_neighbour(last, monkeypatch):
    outputs = OutputProcessor(TINY)
    add(outputs, "bad", n=2)
    add(outputs, "good")
    bad_parent = outputs._parents["bad"]
    make = type(bad_parent).make_output
    monkeypatch.setattr(
        type(bad_parent), "make_output", lambda p: fails() if p is bad_parent else make(p)
    )
    end = FinishReason.STOP if last else None
    (bad, good), to_abort = outputs.process(
        [news("x", "bad/0", end), news("y", "bad/1", end), news("y", "good")]
    )
    assert to_abort == ([] if last else ["bad/0", "bad/1"])
    assert bad.finished
    for index, output in enumerate(bad.outputs):
        assert (output.index, output.finish_reason) == (index, FinishReason.ERROR)
        assert output.error == "ValueError: said no"
    assert (good.outputs[0].text, good.finished) == ("y", False)
    assert not outputs.has_request("bad")


@pytest.mark.parametrize("kind", KINDS)
def test_text_waits_to_be_sent_for_deltas_only(kind):
    """The other kinds never ask for it: it would only grow."""
    outputs = OutputProcessor(TINY)
    add(outputs, kind=kind)
    outputs.process([news("a")])
    completion = outputs._completions["r"]
    outputs._apply(completion, news("b"), 0.0, {})
    assert completion.unsent_text == (["b"] if kind is RequestOutputKind.DELTA else [])


def test_ids_may_not_cross():
    """A completion's id counts too: 'r/1' of one request and the request 'r/1'."""
    outputs = OutputProcessor(TINY)
    add(outputs, "r", n=2)
    for request_id in ("r", "r/1"):
        with pytest.raises(InvalidRequestError) as caught:
            add(outputs, request_id)
        assert caught.value.field == "request_id"
    add(outputs, "s/0")
    with pytest.raises(InvalidRequestError):
        add(outputs, "s", n=2)
    assert outputs.num_requests == 2


def test_without_text():
    """detokenize=False, or an engine without a tokenizer: tokens only."""
    for outputs, params in (
        (OutputProcessor(TINY), {"detokenize": False}),
        (OutputProcessor(None), {}),
    ):
        add(outputs, logprobs=0, **params)
        (found,) = outputs.process([news("hi", logprobs=[scores(104), scores(105)])])[0]
        assert (found.outputs[0].text, found.outputs[0].token_ids) == ("", list(b"hi"))
    assert found.outputs[0].logprobs[0][104].decoded_token is None
