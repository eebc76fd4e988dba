"""`bench step` and `explain --step` without a GPU: constructed traces, and the engine's own part."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.bench import step, step_trace
from octavo.bench.step import StepKind, check_fits, measure_decode, measure_prefill, run_step
from octavo.bench.step_report import draw_step, operation_rows, short_name, summary, table
from octavo.bench.step_trace import (
    Event,
    label_step,
    profile_steps,
    read_chrome_trace,
    split_steps,
)
from octavo.cli import main
from octavo.config.step_cost import H200, Operation, step_operations
from octavo.errors import ConfigError, KernelError, OctavoError
from octavo.executor.calls import CallersThread
from octavo.worker.worker import Worker
from tests.cpu.tiny.helpers import tiny

STREAM = 7
INDEX = "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)"
TO_HOST, FILL = "Memcpy DtoH (Device -> Pinned)", "Memset (Device)"
STRANGE = "void at::native::(anonymous namespace)::stranger<float>(float*)"

# What the Triton backend runs, two layers, and what each kernel is.
LAYER = [
    ("_rms_norm", "input_norm"),
    ("_fixed_linear", "qkv_proj"),
    ("_rope_and_cache", "rope_and_cache"),
    ("attend_small", "attention"),
    ("_fixed_linear", "o_proj"),
    ("_rms_norm", "post_attention_norm"),
    ("_fixed_linear", "gate_up_proj"),
    ("_silu_and_mul", "silu_and_mul"),
    ("_fixed_linear", "down_proj"),
]
TAIL = [
    ("_rms_norm", "final_norm"),
    (INDEX, "gather_rows"),
    ("_fixed_linear", "lm_head"),
    ("scan", "sample"),
    ("draw", "sample"),
]
GRAPH = [
    ("_prepare", "prepare_step"),
    ("_plan", "attention_plan"),
    ("_embed", "embed"),
    *LAYER,
    *LAYER,
    *TAIL,
]
# A layer with experts.
SPARSE = [
    *LAYER[:6],
    ("_fixed_linear", "router"),
    ("_route", "route"),
    ("_order_pairs", "order_pairs"),
    ("_grouped_linear", "experts_gate_up_proj"),
    ("_silu_and_mul", "experts_silu_and_mul"),
    ("_grouped_linear", "experts_down_proj"),
    ("_combine", "combine"),
]
# Eager prefill with cuBLAS: slots written first, large attention tiles, split K, clears, a stranger.
CUBLAS_LAYER = [
    ("_rms_norm", "input_norm"),
    ("nvjet_tst_128x64_64x6_1x2_h_bz_TNT", "qkv_proj"),
    ("_rope_and_cache", "rope_and_cache"),
    ("attend_large", "attention"),
    ("attend_small", "attention"),
    (FILL, "Memset"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "o_proj"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(float*)", "o_proj"),
    ("_rms_norm", "post_attention_norm"),
    (STRANGE, STRANGE),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>(Params)", "gate_up_proj"),
    ("_silu_and_mul", "silu_and_mul"),
    ("void gemv2T_kernel_val<int, int, bf16>(Params)", "down_proj"),
]
EAGER = [
    ("_write_segments", "write_segments"),
    ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ("_prepare", "prepare_step"),
    ("_embed", "embed"),
    ("_plan", "attention_plan"),
    *CUBLAS_LAYER,
    *CUBLAS_LAYER,
    *TAIL,
]


def trace(
    kernels: Sequence[tuple[str, str]], start: float, gap: float = 1.0, duration: float = 2.0
) -> list[Event]:
    """The kernels one after the other."""
    pitch = gap + duration
    return [
        Event(name, start + pitch * index, duration, STREAM)
        for index, (name, _) in enumerate(kernels)
    ]


@pytest.mark.parametrize(
    "kernels", [GRAPH, EAGER, [*LAYER, *SPARSE, *TAIL]], ids=["graph", "eager", "experts"]
)
def test_every_kernel_is_what_its_place_says(kernels: list[tuple[str, str]]) -> None:
    labelled = label_step(trace(kernels, 0.0), num_layers=2)
    assert [label.operation for label in labelled] == [what for _, what in kernels]
    assert {label.operation for label in labelled if not label.known} <= {STRANGE}


def test_kernels_are_known_by_the_names_they_have() -> None:
    folder = Path(step_trace.__file__).parents[1] / "kernels" / "triton"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    for name in (*step_trace._NAMED, step_trace._NORM, "_fixed_linear", "_grouped_linear"):
        assert re.search(rf"@triton\.jit(\([^@]*?\))?\ndef {name}\(", source), name


def test_a_gemm_in_no_known_place_keeps_its_name() -> None:
    events = [Event(name, float(i), 1.0, 7) for i, name in enumerate(("_embed", "some_gemm", "x"))]
    assert [(label.operation, label.known) for label in label_step(events, 2)] == [
        ("embed", True), ("some_gemm", False), ("x", False)
    ]  # fmt: skip


def test_steps_begin_where_their_inputs_are_written() -> None:
    tail = trace(TAIL, 0.0)
    events = [*tail, *trace(EAGER, 100.0), *trace(GRAPH, 300.0), *trace(EAGER, 500.0)]
    steps, num_before = split_steps(events)
    assert num_before == len(tail)
    assert [each[0].name for each in steps] == ["_write_segments", "_prepare", "_write_segments"]
    assert [len(each) for each in steps] == [len(EAGER), len(GRAPH), len(EAGER)]
    # Slots that were written in a step without inputs belong to no later one.
    lone = [Event("_write_segments", 0.0, 1.0, 7), *trace(TAIL, 10.0), *trace(GRAPH, 100.0)]
    assert split_steps(lone)[0][0][0].name == "_prepare"
    assert split_steps(tail) == ([], len(tail))


def test_times_and_gaps_of_decode_steps() -> None:
    """Three steps of 26 kernels of 2 us, 1 us apart; 4, then 6 us between the steps."""
    assert len(GRAPH) == 26
    length = 26 * 2 + 25 * 1
    starts = [50.0, 50 + length + 4.0, 50 + 2 * length + 10.0]
    before = trace(TAIL, 0.0)
    events = [*before, *(event for start in starts for event in trace(GRAPH, start))]
    found = profile_steps(reversed(events), num_layers=2)
    assert found.figures == {
        "num_steps": 3,
        "num_before": len(before),
        "span_us": length,
        "gap_us": {"median": 1.0, "total": 25.0},
        "idle_us": {"median": 5.0, "p99": pytest.approx(5.98)},
    }
    times = {row["name"]: row for row in found.times}
    layers = {what for _, what in LAYER}
    assert all(times[name]["calls"] == 2 for name in layers)
    assert all(times[what]["calls"] == 1 for _, what in GRAPH if what not in layers)
    # scan and draw are one call.
    assert times["sample"] == {
        "name": "sample", "known": True, "calls": 1, "median_us": 4.0, "total_us": 4.0
    }  # fmt: skip
    assert times["qkv_proj"]["median_us"] == 2.0
    assert times["qkv_proj"]["total_us"] == 4.0
    assert all(row["known"] for row in found.times)
    skipped = profile_steps(events, num_layers=2, skip=2)
    assert (skipped.figures["num_steps"], skipped.figures["idle_us"]) == (1, None)
    with pytest.raises(ValueError, match="3 whole steps"):
        profile_steps(events, num_layers=2, skip=3)


def test_times_of_eager_steps_drop_nothing() -> None:
    events = trace(EAGER, 0.0)
    found = profile_steps(events, num_layers=2)
    times = {row["name"]: row for row in found.times}
    assert sum(row["total_us"] for row in found.times) == sum(event.duration_us for event in events)
    assert (times["attention"]["calls"], times["attention"]["median_us"]) == (2, 4.0)
    assert (times["o_proj"]["calls"], times["o_proj"]["median_us"]) == (2, 4.0)
    assert (times[STRANGE]["known"], times[STRANGE]["calls"]) == (False, 2)
    assert times["Memset"]["calls"] == 2
    # A clear or a copy is no gap.
    assert found.figures["gap_us"] == {"median": 1.0, "total": len(EAGER) - 1}


def test_overlapping_kernels_leave_no_gap() -> None:
    events = [Event("_prepare", 0.0, 10.0, 7), Event("x", 2.0, 3.0, 8), Event("y", 9.0, 4.0, 7)]
    figures = profile_steps(events, num_layers=2).figures
    assert (figures["span_us"], figures["gap_us"]["total"]) == (13.0, 0.0)


def test_rows_set_time_beside_cost() -> None:
    costs = [
        Operation("qkv_proj", 2, other_bytes=4_636_000, flops=849_000),
        Operation("lm_head", 1, other_bytes=100, flops=1_698_000_000),
        Operation("elsewhere", 1, other_bytes=10),
    ]
    found = profile_steps(trace(EAGER, 0.0), num_layers=2)
    rows = {row["name"]: row for row in operation_rows(costs, H200, found.times)}
    assert list(rows)[:3] == ["qkv_proj", "lm_head", "elsewhere"]
    assert sum(row.get("share", 0.0) for row in rows.values()) == pytest.approx(1.0)
    assert rows["qkv_proj"]["ceiling_us"] == pytest.approx(1.0)
    assert rows["qkv_proj"]["of_ceiling"] == pytest.approx(0.25)
    assert rows["qkv_proj"]["gb_per_s"] == pytest.approx(1159.0)
    assert rows["lm_head"]["tflop_per_s"] == pytest.approx(849.0)
    assert rows["lm_head"]["of_ceiling"] == pytest.approx(1.0)
    assert rows["lm_head"]["expected_us"] == pytest.approx(6.5)
    assert "total_us" not in rows["elsewhere"]
    assert "bytes" not in rows[STRANGE]
    lines = table(list(rows.values())).splitlines()
    assert len(lines) == len(rows) + 2
    assert lines[0].split()[:2] == ["operation", "calls"]
    [strange] = [line for line in lines if line.startswith("?")]
    assert strange.startswith("? stranger<float>(float*) ")
    assert lines[-1].split()[0] == "total"
    assert "100.0%" in lines[-1]
    assert "share" not in table(operation_rows(costs, H200))


def test_long_names_are_cut() -> None:
    assert short_name("a" * 44) == "a" * 44
    assert short_name("a" * 45) == "a" * 43 + "…"


def test_a_step_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = profile_steps(trace(EAGER, 0.0), num_layers=2)
    rows = operation_rows([Operation("lm_head", 1, other_bytes=10**6)], H200, found.times)
    draw_step(tmp_path / "step.png", found.steps[0], rows, "a step")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--picture: cannot write .*nonsense"):
        draw_step(tmp_path / "step.nonsense", found.steps[0], rows, "a step")
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.style"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(KernelError, match=r"matplotlib: pip install -e '\.\[kernels\]'"):
        draw_step(tmp_path / "step.png", found.steps[0], rows, "a step")


def test_only_gpu_events_of_a_chrome_trace_are_read(tmp_path: Path) -> None:
    def row(cat: str, name: str, ts: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 1.5, "args": {"stream": 7}}

    rows: list[dict[str, Any]] = [
        row("kernel", "_embed", 20.25),
        row("gpu_memset", FILL, 5.0),
        row("gpu_memcpy", TO_HOST, 30.0),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 1},
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    assert read_chrome_trace(path) == [
        (FILL, 5.0, 1.5, 7), ("_embed", 20.25, 1.5, 7), (TO_HOST, 30.0, 1.5, 7)
    ]  # fmt: skip


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """In place of the profiler: what it "saw" while the steps really ran."""
    events: list[Event] = []

    def record(run: Callable[[], None]) -> list[Event]:
        run()
        return events

    monkeypatch.setattr(step, "record", record)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return events


def no_clock_is_left(llm: LLM) -> bool:
    core = llm.engine.core
    owners = (core.scheduler, core._executor, core._executor._worker)
    return not {"schedule", "update", "execute", "launch"} & {n for o in owners for n in vars(o)}


WORK = ("schedule", "launch", "update", "rest")


def added(times: step.Times, *names: str) -> list[float]:
    """Sums of some parts, one a step."""
    return list(map(sum, zip(*(times[name] for name in names), strict=True)))


@pytest.mark.usefixtures("recorded")
def test_launches_of_the_loop_itself_count_once(tiny_model: Path, overlap: bool) -> None:
    """As on a GPU, where no thread of its own launches."""
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        executor = llm.engine.core._executor
        executor._thread.close()
        executor._thread = CallersThread()
        times, _, _ = measure_decode(llm, StepKind("decode", 2, 20), steps=6)
        assert no_clock_is_left(llm)
    assert all(min(values) > 0 for values in times.values())
    assert added(times, *WORK, "collect") == pytest.approx(times["step"])
    assert added(times, *WORK) == pytest.approx(times["work"])
    assert all(work < whole for work, whole in zip(times["work"], times["step"], strict=True))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("context", [1, 60])
def test_decode_steps_are_timed(tiny_model: Path, overlap: bool, context: int) -> None:
    # A budget that spreads the prefill of a batch over steps.
    with tiny(tiny_model, async_scheduling=overlap, max_num_batched_tokens=64) as llm:
        times, _, seq_len = measure_decode(llm, StepKind("decode", 4, context), steps=6)
        assert no_clock_is_left(llm)
    assert set(times) == {"schedule", "launch", "collect", "update", "rest", "work", "step"}
    assert all(len(values) == 6 for values in times.values())
    # A launch may end on its thread when the loop is a step further.
    assert sum(times["launch"]) > 0
    assert all(min(values) > 0 for name, values in times.items() if name != "launch")
    assert added(times, "schedule", "collect", "update", "rest") == pytest.approx(times["step"])
    assert added(times, *WORK) == pytest.approx(times["work"])
    # Six timed steps from the context on, and the middle of eight recorded ones.
    assert max(7, context) + 6 <= seq_len <= max(7, context) + 20


@pytest.mark.usefixtures("recorded")
def test_prefill_steps_are_timed(tiny_model: Path, overlap: bool) -> None:
    with tiny(tiny_model, async_scheduling=overlap, max_num_batched_tokens=128) as llm:
        times, _, seq_len = measure_prefill(llm, StepKind("prefill", 4, 32), steps=3)
        plans = [stats.num_scheduled_tokens for stats in llm.engine.core.step_log]
        assert no_clock_is_left(llm)
    assert seq_len == 32
    assert all(len(values) == 3 for values in times.values())
    assert all(min(times[name]) > 0 for name in ("schedule", "launch", "collect", "update", "rest"))
    # Warm-up, three timed, three recorded, each in one step.
    assert [tokens for tokens in plans if tokens] == [128] * 7


def test_a_result_is_complete(tiny_model: Path, recorded: list[Event]) -> None:
    recorded += [event for i in range(4) for event in trace(GRAPH, 100.0 * i)]
    kind = StepKind("decode", 2, 40, temperature=0.5)
    with tiny(tiny_model) as llm:
        result, found = run_step(llm, kind, steps=4)
        model = llm.engine.config.model
    assert len(found.steps) == 2
    assert json.loads(json.dumps(result)) == result
    assert (result["phase"], result["batch_size"], result["context"]) == ("decode", 2, 40)
    assert result["weight_bytes"] == model.weight_bytes()
    assert result["machine"]["name"] == "H200"
    assert set(result["host_us"]) == {"schedule", "launch", "collect", "update", "rest", "work"}
    assert result["tokens_per_s"] == pytest.approx(2e6 / result["step_us"]["median"])
    profile = result["profile"]
    assert profile["num_steps"] == 2
    assert profile["idle_us"]["median"] == pytest.approx(100 - 77)
    costs = step_operations(model, kind.requests(result["mean_seq_len"]), 2)
    assert [row["name"] for row in profile["operations"][:14]] == [cost.name for cost in costs]
    assert all(row["of_ceiling"] > 0 for row in profile["operations"][:14])
    text = summary(result)
    assert "decode, 2 x 40 tokens: " in text
    assert f"CPU work a step: {result['host_us']['work']:.0f} us (schedule " in text
    assert "GPU idle between steps: 23.0 us (p99 23.0)" in text


def test_a_trace_without_whole_steps_is_an_error(tiny_model: Path, recorded: list[Event]) -> None:
    recorded += trace(TAIL, 0.0)
    with tiny(tiny_model) as llm:
        with pytest.raises(OctavoError, match="the profiler saw too little: 0 whole steps"):
            run_step(llm, StepKind("prefill", 2, 40), steps=1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (StepKind("decode", 9, 10), "9 max_num_seqs; this engine has 8"),
        (StepKind("prefill", 8, 20), "160 max_num_batched_tokens; this engine has 128"),
        (StepKind("decode", 1, 480), "max_model_len; this engine has 512"),
        (StepKind("decode", 8, 120), "KV blocks; this engine has 65"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(tiny_model: Path, kind: StepKind, reason: str) -> None:
    with tiny(tiny_model, max_num_batched_tokens=128, num_gpu_blocks_override=65) as llm:
        with pytest.raises(OctavoError, match=reason):
            run_step(llm, kind, steps=5)
        check_fits(llm, StepKind("decode", 8, 50), steps=5)


def test_prompts_that_run_in_pieces_are_refused(tiny_model: Path) -> None:
    with tiny(tiny_model, long_prefill_token_threshold=16) as llm:
        with pytest.raises(OctavoError, match=r"20 long_prefill_token_threshold; .* has 16"):
            run_step(llm, StepKind("prefill", 2, 20), steps=1)
        check_fits(llm, StepKind("decode", 2, 20), steps=5)


@pytest.mark.parametrize("good", [0, 1, 9, 13], ids=["first", "second", "timed", "last"])
def test_a_failing_request_ends_the_measurement(
    good: int, overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever launch fails: prefill, 5 uncounted steps and 8 that are timed."""
    launch, launches = Worker.launch, itertools.count()

    def launch_or_fail(worker: Worker, plan: Any) -> Any:
        return launch(worker, plan) if next(launches) != good else 1 / 0

    monkeypatch.setattr(Worker, "launch", launch_or_fail)
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        with pytest.raises(OctavoError, match="a request failed: ZeroDivisionError"):
            measure_decode(llm, StepKind("decode", 2, 20), steps=8)


def octavo(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main([*arguments, "--load-format", "dummy"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_bench_step_is_refused_without_a_gpu(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("bench", "step", str(tiny_model))
    status, out, err = octavo(capsys, *command, "--device", "cpu")
    assert (status, out) == (2, "")
    assert err.startswith("octavo: error: bench step measures GPU kernels; cpu (")
    for option, value in (("--steps", "0"), ("--context", "0"), ("--batch-size", "0")):
        with pytest.raises(SystemExit, match="2"):
            octavo(capsys, *command, option, value)
        told = f"octavo: error: argument {option}: must be from 1 to 2147483647, not '0' (options: "
        assert capsys.readouterr().err == f"{told}octavo bench step --help)\n"


def test_explain_step(
    tiny_model: Path, tmp_path: Path, recorded: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("explain", str(tiny_model), "--step")
    status, out, _ = octavo(capsys, *command, "--batch-size", "3", "--context", "20")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "decode, 3 x 20 tokens, bfloat16"
    assert lines[2].split()[0] == "embed"
    assert [line.split()[0] for line in lines[2:17]][-2:] == ["sample", "total"]
    assert "assumed, not those of " in out
    status, out, _ = octavo(capsys, *command, "--prefill", "--context", "500", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["lm_head"]["flops"] == 2 * 64 * 512
    assert rows["qkv_proj"]["flops"] == 2 * 2 * 500 * 64 * 128

    recorded += [event for i in range(4) for event in trace(GRAPH, 100.0 * i)]
    with tiny(tiny_model, dtype="bfloat16") as llm:
        result, _ = run_step(llm, StepKind("decode", 2, 40), steps=2)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    status, out, _ = octavo(capsys, *command, "--measured", str(path))
    assert status == 0
    assert out.startswith(f"decode, 2 x {result['mean_seq_len']} tokens")
    [line] = [line for line in out.splitlines() if line.startswith("lm_head")]
    assert line.split()[1:4] == ["1", "2.00", "2.0"]
    assert any(line.startswith("prepare_step") for line in out.splitlines())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("{", "is not of bench step"),
        ("[" * 100_000, "is not of bench step"),
        ("[]", "is not of bench step"),
        ('{"bench": "latency"}', "is not of bench step: KeyError"),
        (
            '{"phase": "decode", "batch_size": 1, "mean_seq_len": 9, "weight_bytes": 5,'
            ' "profile": {"operations": []}}',
            "is of another model",
        ),
    ],
)
def test_explain_refuses_other_files(
    content: str | None,
    reason: str,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    status, out, err = octavo(capsys, "explain", str(tiny_model), "--measured", str(path))
    assert (status, out) == (2, "")
    assert err.startswith("octavo: error: --measured: ")
    assert str(path) in err
    assert reason in err
    assert len(err.splitlines()) == 1
