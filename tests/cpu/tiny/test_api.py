"""How callers may misuse the public API, and what must hold all the same."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError
from octavo.outputs import RequestOutputKind
from tests.cpu.tiny.helpers import PARAMS, PROMPTS, params, run, tiny, tokens


def test_changing_an_output_does_not_reach_the_engine(tiny_model: Path) -> None:
    """prompt_token_ids of an output is the caller's own list."""
    with tiny(tiny_model) as llm:
        [expected] = tokens(run(llm, [PROMPTS[1]], PARAMS))
        found: list[int] = []
        for output in llm.stream([PROMPTS[1]], PARAMS):
            output.prompt_token_ids += [1] * 300
            found += output.outputs[0].token_ids
        assert found == expected
        assert tokens(run(llm, [PROMPTS[1]], PARAMS)) == [expected]


def test_a_stream_ends_if_its_request_is_aborted_elsewhere(tiny_model: Path) -> None:
    with tiny(tiny_model) as llm:
        stream = llm.stream([[5, 6, 7]], params(max_tokens=300))
        next(stream)
        [name] = llm.engine._sinks
        llm.engine.abort([name])
        rest = list(stream)
        assert rest[-1].outputs[0].finish_reason == "abort"


def test_outputs_reach_their_owner_whoever_drives_the_engine(tiny_model: Path) -> None:
    """A stream whose engine is stepped by hand, and a hand-made request beside generate."""
    with tiny(tiny_model) as llm:
        [expected] = tokens(run(llm, [PROMPTS[0]], PARAMS))
        stream = llm.stream([PROMPTS[0]], PARAMS)
        found = list(next(stream).outputs[0].token_ids)
        llm.engine.add_request("mine", PROMPTS[0], PARAMS, output_kind=RequestOutputKind.FINAL_ONLY)
        assert tokens(run(llm, [PROMPTS[1]], PARAMS))
        mine = [output for _ in range(40) if llm.engine.has_work() for output in llm.engine.step()]
        assert [output.outputs[0].token_ids for output in mine] == [expected]
        for output in stream:
            found += output.outputs[0].token_ids
        assert found == expected


def test_threads_take_turns(tiny_model: Path) -> None:
    with tiny(tiny_model) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        results: dict[int, Any] = {}

        def work(number: int) -> None:
            results[number] = tokens(run(llm, PROMPTS, PARAMS))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert [results.get(number) for number in range(6)] == [expected] * 6


def test_nothing_works_after_shutdown(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), load_format="dummy", skip_tokenizer_init=True)
    stream = llm.stream([[5, 6, 7]], params(max_tokens=300))
    next(stream)
    engine = llm.engine
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        next(stream)
    with pytest.raises(EngineDeadError):
        engine.add_request("late", [1, 2], PARAMS)
    with pytest.raises(EngineDeadError):
        run(llm, [[1]], PARAMS)


def test_wrong_calls_show_no_progress(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny(tiny_model) as llm:
        with pytest.raises(InvalidRequestError):
            llm.generate([[1], [10**6]], PARAMS)
        assert capsys.readouterr().err == ""
        llm.generate([[1], [2]], PARAMS)
        assert "2/2" in capsys.readouterr().err


def test_a_long_text_does_not_take_turns(tiny_model: Path) -> None:
    """Its checks, tokens and stop strings are made while another thread is at work."""
    with tiny(tiny_model) as llm, ThreadPoolExecutor(1) as other:

        def process(_: object) -> str:
            done = other.submit(llm.engine.process, "a", [5], PARAMS)
            return done.result(timeout=20).engine_requests[0].request_id

        assert llm.engine._turns.run(process) == "a"


def test_the_model_is_a_path_or_a_name(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"load_format": "dummy", "skip_tokenizer_init": True}
    for model in (None, 5, "", b"x"):
        with pytest.raises(ConfigError, match="model="):
            LLM(model, **settings)  # type: ignore[arg-type]
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_model / "config.json").read_text())
    with LLM(folder, **settings) as llm:
        assert len(tokens(run(llm, [[5]], PARAMS))[0]) == 8


def test_a_block_of_absurd_size_is_refused_by_name(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        LLM(str(tiny_model), load_format="dummy", skip_tokenizer_init=True, block_size=10**9)
    with tiny(tiny_model, block_size=4096, max_num_seqs=2) as llm:
        assert len(tokens(run(llm, [[5]], PARAMS))[0]) == 8


def test_output_kind_of_a_stream(tiny_model: Path) -> None:
    with tiny(tiny_model) as llm:

        def lengths(kind: Any) -> list[int]:
            stream = llm.stream([[5, 6, 7]], params(max_tokens=4, output_kind=kind))
            return [len(output.outputs[0].token_ids) for output in stream]

        assert lengths(None) == lengths("delta") == [1, 1, 1, 1]
        assert lengths(RequestOutputKind.CUMULATIVE) == [1, 2, 3, 4]
        assert lengths("final_only") == [4]
        with pytest.raises(InvalidRequestError, match="output_kind"):
            lengths("banana")


@pytest.mark.parametrize(
    ("field", "prompts", "settings"),
    [
        ("prompts", None, {}),
        ("prompts", 5, {}),
        ("prompts", b"hello", {}),
        ("prompts", bytearray(b"a"), {}),
        ("prompts", memoryview(b"a"), {}),
        ("prompt_token_ids", range(2**70), {}),
        ("prompts", itertools.repeat("x"), {}),
        ("sampling_params", [[1], [2]], {"sampling_params": []}),
        ("sampling_params", [[1], [2]], {"sampling_params": 0}),
        ("sampling_params", [[1], [2]], {"sampling_params": [PARAMS]}),
        ("priority", [[1], [2]], {"priority": [5, -5]}),
        ("priority", [[1], [2]], {"priority": [0]}),
        ("prompt_token_ids", [[1], [True]], {}),
        ("prompt", [[1], "text"], {}),
    ],
)
def test_wrong_kinds_are_refused_by_name(
    field: str, prompts: Any, settings: dict[str, Any], tiny_model: Path
) -> None:
    with tiny(tiny_model) as llm:
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(prompts, **{"sampling_params": PARAMS, **settings}, use_tqdm=False)
        assert caught.value.field == field


def test_prefill_tokens_count_every_step(tiny_model: Path) -> None:
    """With overlap a step() may make several plans; none is left out of the metrics."""
    for overlap in (False, True):
        with tiny(tiny_model, async_scheduling=overlap, enable_prefix_caching=False) as llm:
            run(llm, PROMPTS, PARAMS)
            total = llm.engine.metrics.num_prefill_tokens
            assert total == sum(len(prompt) for prompt in PROMPTS)


def test_an_abort_does_not_overtake_earlier_news(tiny_model: Path) -> None:
    """What another caller's turn brought of a request comes before the request's end."""
    with tiny(tiny_model) as llm:
        engine = llm.engine
        engine.add_request("a", [3, 4, 5], params(max_tokens=400))
        run(llm, [[7, 8]], params(max_tokens=5))  # drives "a" along, whose news nobody fetches
        assert engine.has_work()
        outputs = engine.abort("a")
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert sum(len(output.outputs[0].token_ids) for output in outputs) > 0
        engine.drain()
        assert engine.step() == []
        assert not engine.has_work()
