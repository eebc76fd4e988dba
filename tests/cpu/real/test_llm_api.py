"""The public API on the real model: generate, stream, chat, stops, n, errors, life cycle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError
from tests.cpu.real.helpers import GREEDY, LONG, SEEDED, TEXTS, engine, fingerprint


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with engine(smollm2_path, dtype="bfloat16") as instance:
        yield instance


def test_chat_answers(llm: LLM) -> None:
    [output] = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0.0, max_tokens=24),
        use_tqdm=False,
    )
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None


def test_stream_joins_to_generate(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=20)
    expected = llm.generate(list(TEXTS), params, use_tqdm=False)
    texts = [""] * len(TEXTS)
    tokens: list[list[int]] = [[] for _ in TEXTS]
    finished = set()
    for output in llm.stream(list(TEXTS), params):
        index = int(output.request_id)
        assert index not in finished
        texts[index] += output.outputs[0].text
        tokens[index] += output.outputs[0].token_ids
        if output.finished:
            finished.add(index)
    assert finished == set(range(len(TEXTS)))
    assert texts == [output.outputs[0].text for output in expected]
    assert tokens == [output.outputs[0].token_ids for output in expected]


def test_closing_a_stream_aborts_its_requests(llm: LLM) -> None:
    stream = llm.stream(list(TEXTS), dataclasses.replace(GREEDY, max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    llm.engine.drain()
    stats = llm.engine.core.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks


def test_a_stream_survives_other_calls(llm: LLM) -> None:
    """Outputs go to the call that asked for them, also when calls are interleaved."""
    [expected] = llm.generate(TEXTS[0], GREEDY, use_tqdm=False)
    stream = llm.stream(TEXTS[0], GREEDY)
    tokens = list(next(stream).outputs[0].token_ids)
    [other] = llm.generate(TEXTS[1], dataclasses.replace(GREEDY, max_tokens=40), use_tqdm=False)
    assert len(other.outputs[0].token_ids) == 40
    for output in stream:
        tokens += output.outputs[0].token_ids
    assert tokens == expected.outputs[0].token_ids


def test_stop_string_across_tokens(llm: LLM) -> None:
    """Cut before the stop string, after it with include_stop_str_in_output; ids are kept."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    prompt = llm.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    [plain] = llm.generate(prompt, params, use_tqdm=False)
    text = plain.outputs[0].text
    stop = text[9:21]
    [cut] = llm.generate(prompt, dataclasses.replace(params, stop=stop), use_tqdm=False)
    assert cut.outputs[0].text == text[:9]
    assert cut.outputs[0].stop_reason == stop
    assert cut.outputs[0].finish_reason == "stop"
    count = len(cut.outputs[0].token_ids)
    assert cut.outputs[0].token_ids == plain.outputs[0].token_ids[:count]
    included = dataclasses.replace(params, stop=stop, include_stop_str_in_output=True)
    [kept] = llm.generate(prompt, included, use_tqdm=False)
    assert kept.outputs[0].text == text[:21]
    assert kept.outputs[0].token_ids == cut.outputs[0].token_ids


def test_n_completions_have_their_own_streams(llm: LLM) -> None:
    params = dataclasses.replace(SEEDED, n=4)
    [output] = llm.generate(LONG, params, use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    [again] = llm.generate(LONG, params, use_tqdm=False)
    assert fingerprint(again) == fingerprint(output)


def test_seed_is_independent_of_batch_mates(llm: LLM) -> None:
    """A seeded request beside unseeded ones, whatever they ask (case P16)."""
    [solo] = llm.generate(TEXTS[0], SEEDED, use_tqdm=False)
    for temperature in (0.0, 0.5, 1.5):
        mate = SamplingParams(temperature=temperature, max_tokens=9, top_k=5)
        outputs = llm.generate([TEXTS[1], TEXTS[0]], [mate, SEEDED], use_tqdm=False)
        assert fingerprint(outputs[1]) == fingerprint(solo)


def test_penalties_in_a_batch(llm: LLM) -> None:
    """Penalised short request beside a long plain one, both orders (case P20)."""
    penalised = dataclasses.replace(
        GREEDY, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3
    )
    [solo] = llm.generate("Paris Paris Paris", penalised, use_tqdm=False)
    [plain] = llm.generate("Paris Paris Paris", GREEDY, use_tqdm=False)
    assert fingerprint(solo)[0][0] != fingerprint(plain)[0][0]
    for order in (1, -1):
        texts = ["Paris Paris Paris", LONG][::order]
        mixed = llm.generate(texts, [penalised, GREEDY][::order], use_tqdm=False)
        assert fingerprint(mixed[::order][0]) == fingerprint(solo)


@pytest.mark.parametrize(
    ("field", "prompt", "params"),
    [
        ("prompt_token_ids", {"prompt_token_ids": [1, 49152]}, {}),
        ("prompt_token_ids", {"prompt_token_ids": [-1]}, {}),
        ("prompt_token_ids", {"prompt_token_ids": []}, {}),
        ("logit_bias", "x", {"logit_bias": {49152: 1.0}}),
        ("stop_token_ids", "x", {"stop_token_ids": [49157], "min_tokens": 1}),
        ("allowed_token_ids", "x", {"allowed_token_ids": [50000]}),
        ("logprobs", "x", {"logprobs": 21}),
        ("prompt", "x " * 5000, {}),
    ],
)
def test_invalid_request_names_the_field_and_disturbs_nobody(
    field: str, prompt: object, params: dict[str, object], llm: LLM
) -> None:
    """Cases P05, P06, P07: refused before anything runs; the neighbour of a live stream is equal
    to its solo run."""
    [solo] = llm.generate(TEXTS[0], GREEDY, use_tqdm=False)
    stream = llm.stream([TEXTS[0]], GREEDY)
    tokens = list(next(stream).outputs[0].token_ids)
    with pytest.raises(InvalidRequestError) as caught:
        llm.engine.add_request("bad", prompt, SamplingParams(**params))  # type: ignore[arg-type]
    assert caught.value.field == field
    for output in stream:
        tokens += output.outputs[0].token_ids
    assert tokens == solo.outputs[0].token_ids


def test_one_bad_prompt_refuses_the_batch_before_it_runs(llm: LLM) -> None:
    steps = len(llm.engine.core.step_log)
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        llm.generate(["fine", {"prompt_token_ids": [49152]}], GREEDY, use_tqdm=False)
    assert len(llm.engine.core.step_log) == steps


def test_priority_runs_first(smollm2_path: Path) -> None:
    settings = {"scheduling_policy": "priority", "max_num_seqs": 1}
    with engine(smollm2_path, dtype="float32", **settings) as llm:
        outputs = llm.generate(list(TEXTS[:3]), GREEDY, use_tqdm=False, priority=[5, 1, 3])
        starts = [output.metrics.first_scheduled_time for output in outputs if output.metrics]
        assert sorted(range(3), key=lambda index: starts[index] or 0.0) == [1, 2, 0]


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_num_sequences"):
        LLM("x", max_num_sequences=3)
    with pytest.raises(ConfigError, match="scheduling_policy"):
        LLM("x", scheduling_policy="lifo")
    with pytest.raises(ModelLoadError, match="no/such/folder"):
        LLM("./no/such/folder")


def test_shutdown_is_final(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), max_model_len=256)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        llm.generate("x", GREEDY)


@pytest.mark.parametrize(
    ("field", "messages", "options"),
    [
        ("messages", {"role": "user", "content": "x"}, {}),
        ("messages", 5, {}),
        ("messages", ["x"], {}),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], {}),
        ("chat_template_kwargs", [{"role": "user", "content": "x"}], {"messages": 1}),
        ("chat_template_kwargs", [{"role": "user", "content": "x"}], {"add_generation_prompt": 1}),
    ],
)
def test_bad_conversations_name_the_field(
    field: str, messages: Any, options: dict[str, Any], llm: LLM
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs=options)
    assert caught.value.field.startswith(field)
