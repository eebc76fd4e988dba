"""`bench step` on the GPU: every kernel of a step is known by what it does, and the result is whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.engines import SHAPES, engine, model_folder

from octavo.bench.step import PROFILED, StepKind, run_step
from octavo.cli import main

PER_LAYER = {
    "input_norm", "qkv_proj", "rope_and_cache", "attention", "o_proj", "post_attention_norm",
    "gate_up_proj", "silu_and_mul", "down_proj",
}  # fmt: skip
ONCE = {"embed", "attention_plan", "final_norm", "gather_rows", "lm_head", "sample", "prepare_step"}
STEPS = 6


def check(result: dict[str, Any], num_layers: int) -> dict[str, dict[str, Any]]:
    """A result is JSON without holes; returns its operations by name."""
    assert json.loads(json.dumps(result)) == result
    rows = {row["name"]: row for row in result["profile"]["operations"]}
    assert {name: rows[name]["calls"] for name in PER_LAYER} == dict.fromkeys(PER_LAYER, num_layers)
    assert {name: rows[name]["calls"] for name in ONCE} == dict.fromkeys(ONCE, 1)
    for name in (PER_LAYER | ONCE) - {"attention_plan", "prepare_step"}:
        assert rows[name]["of_ceiling"] > 0, name
        assert rows[name]["gb_per_s"] > 0, name
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    host = result["host_us"]
    assert all(host[name] > 0 for name in ("schedule", "launch", "collect", "update", "rest"))
    assert host["launch"] < host["work"] < result["step_us"]["median"]  # nothing is counted twice
    profile = result["profile"]
    assert profile["span_us"] > 0
    assert 0 <= profile["gap_us"]["total"] < profile["span_us"]
    return rows


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("backend", ["fixed", "cublas"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_kernel_of_a_step_is_known(
    phase: str, eager: bool, backend: str, shape: str, tmp_path: Path
) -> None:
    # 3 x 100 tokens of prefill still fit a graph.
    kind = StepKind(phase, 3, 100, temperature=0.6)
    model = model_folder(tmp_path, shape)
    with engine(
        model, linear_backend=backend, enforce_eager=eager, enable_prefix_caching=False
    ) as llm:
        result, found = run_step(llm, kind, STEPS)
    rows = check(result, SHAPES[shape]["num_hidden_layers"])
    assert [name for name, row in rows.items() if not row["known"]] == []
    if phase == "decode":
        # Up to two steps that were in flight around the recorded ones may be whole as well.
        assert STEPS <= len(found.steps) <= STEPS + 2
        assert 0 <= result["profile"]["idle_us"]["median"] <= result["profile"]["idle_us"]["p99"]
        assert 100 + STEPS <= result["mean_seq_len"] <= 100 + 3 * STEPS
    else:
        assert len(found.steps) == PROFILED["prefill"]
        assert result["profile"]["idle_us"] is None


def test_the_command_line_from_measurement_to_explanation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES["qwen"]))
    output, picture = tmp_path / "result.json", tmp_path / "step.png"
    options = [
        "--load-format",
        "dummy",
        "--max-model-len",
        "512",
        "--num-gpu-blocks-override",
        "600",
    ]
    drawn = importlib.util.find_spec("matplotlib") is not None
    drawing = ["--picture", str(picture)] if drawn else []
    arguments = ["--batch-size", "2", "--context", "50", "--steps", "4", *drawing]
    command = ["bench", "step", str(model), *arguments, "--output-json", str(output), *options]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("decode, 2 x 50 tokens: ")
    assert printed[-1] + "\n" == output.read_text()
    check(json.loads(printed[-1]), SHAPES["qwen"]["num_hidden_layers"])
    assert picture.is_file() == drawn
    assert main(["explain", str(model), "--measured", str(output), *options]) == 0
    explained = capsys.readouterr().out
    assert "total us" in explained
    assert "prepare_step" in explained
