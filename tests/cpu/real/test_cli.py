"""The command line as a user calls it, on the real model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.worker import device

FAST = ["--max-model-len", "512", "--dtype", "bfloat16"]


def octavo(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_generate_from_arguments_file_and_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The sea is\n\nOnce upon a time\n", "utf-8")
    greedy = ["--temperature", "0", "--max-tokens", "6", "--json", *FAST]
    status, out, _ = octavo(capsys, "generate", "demo", "A", "--file", str(prompts), *greedy)
    assert status == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["A", "The sea is", "Once upon a time"]
    assert all(len(row["outputs"][0]["token_ids"]) == 6 for row in rows)
    monkeypatch.setattr("sys.stdin", io.StringIO("The sea is\n"))
    status, out, _ = octavo(capsys, "generate", "demo", *greedy)
    assert status == 0
    assert json.loads(out)["outputs"] == rows[1]["outputs"]


def test_generate_chat_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    question = "What is the capital of France?"
    status, out, _ = octavo(
        capsys, "generate", "demo", "--chat", question, "--temperature", "0", *FAST
    )
    assert status == 0
    assert out == f"> {question}\nThe capital of France is Paris.\n\n"


def test_chat_reads_commands_and_messages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "/set temperature 0",
        "What is the capital of France?",
        "/stats",
        "And of Italy?",
        "/undo",
        "/undo",
        "/set max_tokens lots",
        "/set nonsense 3",
        "/nonsense",
        "/system You are terse.",
        "/reset",
        "/params",
        "/help",
        "/exit",
        "never read",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    status, out, _ = octavo(capsys, "chat", "demo", *FAST)
    assert status == 0
    assert "The capital of France is Paris." in out
    assert "prompt tokens" in out
    assert "Rome" in out
    assert "! max_tokens: 'lots' is not a value" in out
    assert "! nonsense: is not a sampling parameter" in out
    assert "! no command /nonsense" in out
    assert "temperature = 0" in out


def test_info_and_explain(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = octavo(capsys, "info", "demo", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["parameters"] == "134,515,008"
    assert facts["kv_bytes_per_token"] == "23,040"
    status, out, _ = octavo(capsys, "explain", "demo", "--max-num-seqs", "3", "--json")
    decisions = {row["name"]: row for row in json.loads(out)}
    assert status == 0
    assert decisions["max_num_seqs"] == {"name": "max_num_seqs", "value": "3", "reason": "as given"}
    assert decisions["dtype"]["value"] == "bfloat16"
    assert all(row["reason"] for row in decisions.values())


def test_explain_says_whose_kernels_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")
    assert "torch, fixed row tiles" in octavo(capsys, "explain", "demo", "--device", "cpu")[1]
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "1")
    monkeypatch.setattr(device, "cpu_flags", lambda: "sse avx512f")
    assert "our own kernels" in octavo(capsys, "explain", "demo", "--device", "cpu")[1]
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "maybe")
    for verb in ("explain", "info"):
        assert "'maybe' is not 0 or 1" in octavo(capsys, verb, "demo", "--device", "cpu")[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-size", "8"], "add --step"),
        (["--context", "5"], "add --step"),
        (["--prefill"], "add --step"),
        (["--step", "--context", "8193"], "8193 is more than the model's context of 8192"),
    ],
)
def test_explain_ignores_no_option(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = octavo(capsys, "explain", "demo", *options)
    assert (status, out) == (2, "")
    assert words in err


@pytest.mark.parametrize("kind", ["latency", "throughput", "prefix"])
def test_bench_prints_json_last(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "latency": "--output-len 4 --batch-size 2 --warmup 0 --iterations 1",
        "throughput": "--output-len 4 --num-prompts 3 --warmup 0",
        "prefix": "--iterations 1",
    }
    status, out, _ = octavo(
        capsys, "bench", kind, "demo", "--input-len", "40", *options[kind].split(), *FAST
    )
    result = json.loads(out.splitlines()[-1])
    assert status == 0
    assert result["bench"] == kind
    assert result["environment"]["src_tree"]
    if kind == "prefix":
        assert (result["cold_computed_tokens"], result["warm_computed_tokens"]) == (60, 28)
        assert (result["input_len"], result["output_len"]) == (60, 1)
    else:
        assert result["output_tokens_per_s"] > 0


def test_demo_shows_answers_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = octavo(
        capsys, "demo", "What is the capital of France?", "Say hello.", "--max-tokens", "8"
    )
    assert status == 0
    assert "[1] The capital of France is Paris." in out
    assert "KV blocks used at most" in out
    assert "TTFT ms" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "/no/such/model.gguf", "x"], "/no/such/model.gguf"),
        (["generate", "demo", "x", "--top-p", "1.5"], "top_p"),
        (["generate", "demo", "x", "--file", "/no/such/file"], "/no/such/file: No such file"),
        (["generate", "demo", "x", "--file", "/usr"], "/usr: Is a directory"),
        (["generate", "demo", "x", "--file", sys.executable], "is not text"),
        (["bench", "throughput", "demo", "--temperature", "-1"], "temperature"),
        (["bench", "latency", "demo", "--output-json", "/usr"], "/usr: Is a directory"),
        (["bench", "prefix", "demo", "--output-json", "/no/such/x"], "/no/such/x: No such file"),
        (["info", "demo", "--max-model-len", "999999"], "max_model_len"),
        (["explain", "demo", "--block-size", "0"], "block_size"),
        (["generate", "demo", "x", "--device", "cuda"], "device"),
    ],
)
def test_errors_are_one_line_and_status_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = octavo(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert expected in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "x", "--max-tokens", "0"], "--max-tokens: must be from 1"),
        (["demo", "x", "--max-tokens", "many"], "--max-tokens: must be from 1"),
        (["bench", "latency", "demo", "--warmup", "-1"], "--warmup: must be from 0"),
        (["bench", "latency", "demo", "--batch-size", "0"], "--batch-size: must be from 1"),
    ],
)
def test_numbers_out_of_range_are_one_line_and_status_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    err = capsys.readouterr().err
    assert expected in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["bench", "prefix", "demo", "--output-len", "3"], "--output-len"),
        (["bench", "prefix", "demo", "--warmup", "3"], "--warmup"),
        (["bench", "latency", "demo", "--temperature", "1"], "--temperature"),
        (["bench", "latency", "demo", "--num-prompts", "3"], "--num-prompts"),
        (["bench", "throughput", "demo", "--batch-size", "3"], "--batch-size"),
        (["chat", "demo", "--logprobs", "1"], "--logprobs"),
        (["chat", "demo", "--prompt-logprobs", "1"], "--prompt-logprobs"),
        (["chat", "demo", "-n", "2"], "-n"),
        (["chat", "demo", "--n", "2"], "--n"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"unrecognized arguments: {refused}" in capsys.readouterr().err
