"""The command line on a tiny model: failures, interrupts, and what is shown of them."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from octavo import LLM, SamplingParams
from octavo.bench.offline import check_produced, run_throughput
from octavo.cli import chat as cli_chat
from octavo.cli import demo, info, main, program
from octavo.cli.chat import Session
from octavo.config.resolve import DeviceFacts
from octavo.core.scheduler_output import EngineCoreOutput
from octavo.engine.engine_core import EngineCore
from octavo.errors import OctavoError
from octavo.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from tests.cpu.tiny.conftest import TINY

DUMMY = ["--load-format", "dummy"]
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def _interruptible() -> Generator[None, None, None]:
    """A shell starts background jobs with SIGINT ignored; these tests are about pressing Ctrl-C."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model whose tokens are bytes; its weights are to be DUMMY."""
    folder = tmp_path_factory.mktemp("letters")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**TINY, "vocab_size": len(vocab)}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": CHAT})
    )
    return str(folder)


def octavo(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("kind", ["latency", "throughput", "prefix"])
@pytest.mark.parametrize("length", [30, 2**31 - 1])  # prompts of the latter would fill the memory
def test_bench_refuses_lengths_that_do_not_fit(
    kind: str, length: int, letters: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "result.json"
    lengths = ["--input-len", str(length), "--max-model-len", "40"]
    lengths += [] if kind == "prefix" else ["--output-len", "20"]
    status, out, err = octavo(
        capsys, "bench", kind, letters, *lengths, *DUMMY, "--output-json", str(output)
    )
    assert (status, out) == (2, "")
    asked = f"{length + 20} tokens and an output of 1" if kind == "prefix" else f"{length} tokens "
    assert f"octavo: error: a prompt of {asked}" in err
    assert err.endswith(" do not fit into max_model_len=40\n")
    assert not output.exists()


def test_bench_names_the_errors_of_failed_requests(
    letters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(letters, load_format="dummy") as llm:
        worker = llm.engine.core._executor._worker

        def fail(plan: object) -> None:
            raise ValueError("no such luck")

        monkeypatch.setattr(worker, "launch", fail)
        with pytest.raises(OctavoError, match=r"^0 of 6 .* 2 of 2 requests failed: .*no such luck"):
            run_throughput(llm, input_len=4, output_len=3, num_prompts=2, warmup=0, temperature=0.0)


def test_produced_tokens_are_counted_a_request() -> None:
    def output(*token_ids: int) -> RequestOutput:
        completion = CompletionOutput(0, "", list(token_ids), finish_reason=FinishReason.STOP)
        return RequestOutput("0", None, [1], [completion], True)

    check_produced([output(5, 6), output(7, 8)], 2)
    with pytest.raises(OctavoError, match=r"3 of 4 .*an output of 2 ended after 1 \(stop\)"):
        check_produced([output(5), output(7, 8)], 2)
    with pytest.raises(OctavoError, match="4 of 4"):
        check_produced([output(5), output(7, 8, 9)], 2)


def test_bench_writes_the_line_it_prints(
    letters: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "result.json"
    lengths = ["--input-len", "8", "--output-len", "4"]
    status, out, _ = octavo(
        capsys, "bench", "latency", letters, *lengths, *DUMMY, "--output-json", str(output)
    )
    assert status == 0
    assert output.read_text() == out.splitlines(keepends=True)[-1]
    result = json.loads(output.read_text())
    assert (result["input_len"], result["output_len"], result["batch_size"]) == (8, 4, 8)
    status, out, err = octavo(
        capsys, "bench", "latency", letters, *lengths, *DUMMY, "--output-json", "/dev/full"
    )
    assert status == 2
    assert json.loads(out.splitlines()[-1])["bench"] == "latency"  # not lost
    assert err == "octavo: error: --output-json: cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize("available_bytes", [4096, 300_000])
def test_info_describes_a_model_that_does_not_fit(
    available_bytes: int,
    letters: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether resolving the settings finds out, or sizing the pool."""
    facts_now = DeviceFacts("cpu", "small machine", 1, available_bytes)
    monkeypatch.setattr(info, "probe_device", lambda wanted: facts_now)
    status, out, err = octavo(capsys, "info", letters, "--json")
    facts = json.loads(out)
    assert (status, err) == (0, "")
    assert facts["layers"].startswith("2 of hidden size 64")
    assert "fits: one block of 16" in facts["kv_pool"] or "are free" in facts["kv_pool"]
    assert facts["requests_of_full_context"] == "0.0"


def test_generate_prints_scores_that_were_asked_for(
    letters: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--max-tokens", "3", "--temperature", "0", "--ignore-eos", *DUMMY]
    status, out, _ = octavo(capsys, "generate", letters, "abc", *asked)
    assert status == 0
    assert " | " not in out
    scores = ["--logprobs", "2", "--prompt-logprobs", "0"]
    status, out, _ = octavo(capsys, "generate", letters, "abc", *asked, *scores)
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "> abc"
    assert [line.split()[-1] for line in lines[1:3]] == ["'b'", "'c'"]
    assert all(line.startswith("    -") for line in lines[1:3])
    assert sum(" | " in line for line in lines) == 3


def test_a_dash_is_stdin(
    letters: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("cd\n\nef\n"))
    status, out, _ = octavo(capsys, "generate", letters, "-", "ab", "--max-tokens", "1", *DUMMY)
    assert status == 0
    assert [line for line in out.splitlines() if line[:1] == ">"] == ["> ab", "> cd", "> ef"]


def test_several_completions_are_numbered(letters: str, capsys: pytest.CaptureFixture[str]) -> None:
    for n, numbers in ((1, []), (2, ["[1]", "[2]"])):
        asked = ["--n", str(n), "--max-tokens", "3", "--temperature", "0", "--ignore-eos", *DUMMY]
        status, out, _ = octavo(capsys, "generate", letters, "abc", *asked)
        assert status == 0
        assert [line for line in out.splitlines() if line[:1] == "["] == numbers


def test_options_that_are_not_given_are_the_models(
    letters: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As docs/architecture.md says, "Defaults of requests"."""
    folder = str(shutil.copytree(letters, tmp_path / "model"))
    Path(folder, "generation_config.json").write_text('{"do_sample": false}')
    asked = ["generate", folder, "abc", "--max-tokens", "8", "--ignore-eos", "--json", *DUMMY]
    tokens = []
    for more in (["--temperature", "0"], [], ["--temperature", "1"]):
        status, out, _ = octavo(capsys, *asked, *more)
        assert status == 0
        tokens.append(json.loads(out)["outputs"][0]["token_ids"])
    assert tokens[0] == tokens[1] != tokens[2]
    for more, temperature in (([], "0.0"), (["--temperature", "0.5"], "0.5")):
        monkeypatch.setattr("sys.stdin", io.StringIO("/params\n"))
        _, out, _ = octavo(capsys, "chat", folder, *more, *DUMMY)
        assert f"  temperature = {temperature}\n" in out


def test_stdin_that_is_not_text_is_one_line(
    letters: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for verb in ("generate", "chat"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), "utf-8"))
        status, out, err = octavo(capsys, verb, letters, *DUMMY)
        assert (status, out, err) == (2, "", "octavo: error: stdin: is not text\n")


def test_prompts_without_end_are_refused_by_name(
    letters: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = octavo(capsys, "generate", letters, *DUMMY, "--file", "/dev/zero")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("octavo: error: --file: /dev/zero has more than ")
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        status, _, err = octavo(capsys, "generate", letters, *DUMMY)
    assert status == 2
    assert err.startswith("octavo: error: stdin: has more than ")


def test_prompts_come_from_pipes_too(letters: str) -> None:
    command = f"{sys.executable} -m octavo generate {letters} --max-tokens 1 {' '.join(DUMMY)}"
    for line in (
        f"printf 'ab\\ncd\\n' | {command} --file /dev/stdin",
        f"{command} --file <(printf 'ab\\ncd\\n')",
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert [x for x in done.stdout.splitlines() if x.startswith("> ")] == ["> ab", "> cd"]


def test_closed_reader_ends_without_traceback(letters: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for arguments in (["info", letters], ["--help"]):
        command = [sys.executable, "-c", "from octavo.cli import main; raise SystemExit(main())"]
        process = subprocess.run([*command, *arguments], stdout=writer, stderr=subprocess.PIPE)
        assert (process.returncode, process.stderr) == (141, b"")
    os.close(writer)


def test_demo_with_a_prompt_that_is_too_long(
    letters: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "DEMO", letters)
    status, _, err = octavo(capsys, "demo", "x" * 50, "--max-model-len", "40", *DUMMY)
    assert status == 2
    assert err.startswith("octavo: error: prompt: 50 prompt tokens")
    assert len(err.splitlines()) == 1


def test_demo_tells_of_failed_requests_and_no_steps(
    letters: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Generator[RequestOutput, None, None]:
        outputs = [CompletionOutput(0, finish_reason=FinishReason.ERROR, error="no such luck")]
        yield RequestOutput("0", None, [5], outputs, True, metrics=RequestMetrics(0.0))

    monkeypatch.setattr(demo, "DEMO", letters)
    monkeypatch.setattr(LLM, "stream", fail)
    status, out, _ = octavo(capsys, "demo", "x", *DUMMY)
    assert status == 1
    assert ["steps", "0"] in [line.split() for line in out.splitlines()]
    assert out.endswith("! [1] no such luck\n")


def session(llm: LLM, **settings: Any) -> Session:
    params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    return Session(llm, SamplingParams(**{**params, **settings}), None)


def press(key: Callable[[], None], after: int) -> Callable[..., list[EngineCoreOutput]]:
    """EngineCore.step that presses a key amid its `after`-th call."""
    calls = 0
    step = EngineCore.step

    def stepping(self: EngineCore, *waiting: Any) -> list[EngineCoreOutput]:
        nonlocal calls
        calls += 1
        if calls == after:
            key()
        return step(self, *waiting)

    return stepping


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("key", [interrupt, lambda: signal.raise_signal(signal.SIGINT)])
@pytest.mark.parametrize("after", [1, 4])
def test_ctrl_c_stops_the_answer_and_not_the_chat(
    key: Callable[[], None],
    after: int,
    letters: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(letters, load_format="dummy") as llm:
        chat = session(llm)
        with monkeypatch.context() as patch:
            patch.setattr(EngineCore, "step", press(key, after))
            chat.handle("first")
        assert "[stopped]\n" in capsys.readouterr().out
        kept = len(chat.messages)
        assert kept in (0, 2)
        chat.handle("second")
        assert len(chat.messages) == kept + 2
        assert "[stopped]" not in capsys.readouterr().out
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        llm.engine.drain()
        assert llm.engine.core.scheduler.is_idle_clean()


class Keys(io.StringIO):
    """What is typed, line by line: ^C in a line is Ctrl-C, and the rest of it is lost."""

    def __init__(self, text: str, terminal: bool) -> None:
        super().__init__(text)
        self.isatty = lambda: terminal  # type: ignore[method-assign]

    def readline(self, size: int | None = -1) -> str:
        line = super().readline()
        if "^C" in line:
            signal.raise_signal(signal.SIGINT)
        return line


class PressedAt:
    """A text during whose printing Ctrl-C is pressed."""

    def __str__(self) -> str:
        signal.raise_signal(signal.SIGINT)
        return "printed to the end"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("line", ["/help", "^C", "half a quest^C"])
def test_ctrl_c_beside_an_answer_ends_a_command_or_a_line(
    line: str,
    terminal: bool,
    letters: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a terminal the chat goes on and says how to leave; of a script it is the end."""
    monkeypatch.setattr(cli_chat, "HELP", PressedAt())
    monkeypatch.setattr("sys.stdin", Keys(f"{line}\n{line}\n/stats\n/exit\n", terminal))
    status, out, err = octavo(capsys, "chat", letters, *DUMMY)
    assert (status, err) == ((0, "") if terminal else (130, ""))
    assert out.count("\n(Ctrl-D or /exit leaves)\n") == 2 * terminal
    assert ("no answer yet" in out) == terminal
    assert "printed" not in out


def test_a_second_ctrl_c_cannot_break_into_the_end_of_the_program(
    letters: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    shutdown = LLM.shutdown

    def pressed_again(llm: LLM) -> None:
        signal.raise_signal(signal.SIGINT)
        shutdown(llm)
        ends.append(signal.getsignal(signal.SIGINT))

    first = press(lambda: signal.raise_signal(signal.SIGINT), after=2)
    monkeypatch.setattr(EngineCore, "step", first)
    monkeypatch.setattr(LLM, "shutdown", pressed_again)
    monkeypatch.setattr("sys.argv", ["octavo", "generate", letters, "a", "--ignore-eos", *DUMMY])
    assert program() == 130
    assert len(ends) == 1
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # till Python has ended
    assert capsys.readouterr() == ("", "")


def test_each_ctrl_c_at_the_program_that_was_handled_makes_way_for_the_next(
    letters: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["octavo", "chat", letters, *DUMMY])
    monkeypatch.setattr("sys.stdin", Keys("^C\n^C\n^C\n/exit\n", terminal=True))
    assert program() == 0
    assert capsys.readouterr().out.count("\n(Ctrl-D or /exit leaves)\n") == 3


def test_interrupted_answer_does_not_show_the_error_of_the_last_one(
    letters: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: Any) -> Generator[RequestOutput, None, None]:
        outputs = [CompletionOutput(0, finish_reason=FinishReason.ERROR, error="no such luck")]
        yield RequestOutput("0", None, [5], outputs, True)

    def interrupted(*_: Any) -> Generator[RequestOutput, None, None]:
        raise KeyboardInterrupt
        yield

    with LLM(letters, load_format="dummy") as llm:
        chat = session(llm)
        monkeypatch.setattr(llm, "stream", failed)
        chat.handle("first")
        assert capsys.readouterr().out == "\n! no such luck\n"
        monkeypatch.setattr(llm, "stream", interrupted)
        chat.handle("second")
        chat.handle("/stats")
        assert capsys.readouterr().out == " [stopped]\nno answer yet\n"
        assert chat.messages == []


def test_chat_sets_and_shows_only_what_it_uses(
    letters: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(letters, load_format="dummy") as llm:
        chat = session(llm)
        for line in ("/set logprobs 2", "/set n 2", "/params"):
            chat.handle(line)
        chat.handle("/set temperature {[]:1}")
    out = capsys.readouterr().out
    assert "temperature: '{[]:1}' is not a value" in out
    assert out.count("is not a sampling parameter that can be set") == 2
    assert "prompt_logprobs" not in out


def test_closed_streams_and_a_full_disk_are_no_tracebacks(letters: str) -> None:
    """Standard streams may be closed, and stdout may refuse what is written."""
    command = f"{sys.executable} -m octavo"
    for line, status in (
        (f"{command} info {letters} --load-format dummy > /dev/full", 2),
        (f"{command} generate {letters} --load-format dummy <&-", 2),
        (f"{command} info {letters} --load-format dummy 2>&-", 0),
        (f"{command} info /nowhere 2>/dev/full", 2),
    ):
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 1
    nobody, stderr = os.pipe()
    os.close(nobody)
    gone = subprocess.run([*command.split(), "none"], stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(stderr)
    assert gone.returncode == 2


@pytest.mark.parametrize(
    ("verb", "shown"),
    [
        ("chat", ["[the model's, else 0.7]", "[the model's, else 0.95]", "[1024]"]),
        ("generate", ["[128]", "[the model's, else 1.0]", "[0.0]"]),
    ],
)
def test_help_shows_the_defaults_of_its_verb(
    verb: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(default in text for default in shown)
    assert "[16]" not in text.split("engine settings")[0]


@pytest.mark.parametrize("option", ["--batch-size", "--context"])
def test_numbers_without_measure_are_refused_by_name(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "demo", "--step", option, "9" * 400])
    assert f"argument {option}: must be from 1 to 2147483647" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("bench latency demo --num-iters 1", "octavo bench latency"),
        ("bench latency demo --input-len x", "octavo bench latency"),
        ("kernels list --json", "octavo kernels list"),
        ("kernels", "octavo kernels"),
        ("info demo --jso", "octavo info"),  # no abbreviations
        ("bench latency demo --batch 1", "octavo bench latency"),
    ],
)
def test_a_bad_command_line_names_the_help_that_lists_the_options(
    line: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert capsys.readouterr().err.endswith(f" (options: {hint} --help)\n")
