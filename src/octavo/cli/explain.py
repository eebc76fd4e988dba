"""`octavo explain`: each resolved setting and why, or what a step must do; without loading weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from octavo.bench.report import columns
from octavo.bench.step import StepKind
from octavo.bench.step_report import Row, machine_text, operation_rows, table
from octavo.cli import options
from octavo.config.engine import EngineArgs
from octavo.config.model import ModelConfig
from octavo.config.resolve import estimate_pool, finalise, make_args, resolve
from octavo.config.step_cost import machine_for, step_operations
from octavo.errors import ConfigError
from octavo.files import read_text
from octavo.weights.checkpoint import load_model_config
from octavo.worker.device import probe_device

# An embedding model has no cache, no scheduler, no sampler and no graphs.
LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
OF_ENCODERS = ("device", "dtype", "linear_backend", *LIMITS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="a JSON list on stdout")
    step = parser.add_argument_group("what a step must do")
    step.add_argument("--step", action="store_true", help="bytes, FLOPs and ceilings by operation")
    options.add_step_arguments(step)
    what = "of `bench step --output-json`: its step, and times"
    step.add_argument("--measured", type=Path, metavar="FILE", help=what)
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line a decision, or one an operation."""
    settings = make_args(options.engine_settings(args))
    if args.step or args.measured is not None:
        return explain_step(args, settings)
    if (args.phase, args.batch_size, args.context) != ("decode", 1, 1024):
        raise ConfigError("--batch-size, --context and --prefill say what step: add --step")
    model = load_model_config(settings)
    facts = probe_device(settings.device)
    config = resolve(settings, model, facts)
    if model.encoder is None:
        config = finalise(config, *estimate_pool(config, facts))
    shown = OF_ENCODERS if model.encoder else [one.name for one in config.decisions]
    rows = [dataclasses.asdict(one) for one in config.decisions if one.name in shown]
    print(json.dumps(rows) if args.json else columns([list(row.values()) for row in rows]))
    return 0


def explain_step(args: argparse.Namespace, settings: EngineArgs) -> int:
    """Print what a step must do on this machine, beside what a measurement says that it took."""
    model = load_model_config(settings)
    if model.encoder is not None:
        raise ConfigError(f"--step: {model.path} is an embedding model, which has no such steps")
    if model.dtype == "float32":  # as `resolve` decides on a GPU
        model = dataclasses.replace(model, dtype="bfloat16")
    kind = StepKind(args.phase, args.batch_size, args.context)
    times: list[Row] = []
    if args.measured is not None:
        kind, times = read_measured(args.measured, model)
    elif kind.context > (limit := model.max_position_embeddings):
        raise ConfigError(f"--context: {kind.context} is more than the model's context of {limit}")
    machine = machine_for(probe_device(settings.device).name)
    costs = step_operations(model, kind.requests(kind.context), kind.batch_size)
    rows = operation_rows(costs, machine, times)
    text = f"{kind.phase}, {kind.batch_size} x {kind.context} tokens, {model.dtype}\n"
    print(json.dumps(rows) if args.json else f"{text}{table(rows)}\n{machine_text(machine)}")
    return 0


def read_measured(path: Path, model: ModelConfig) -> tuple[StepKind, list[Row]]:
    """The step that a result of `bench step` is of, and times as in `StepProfile`.

    Raises ConfigError for another kind of file, or if it is of another model.
    """
    keys = ("name", "known", "calls", "median_us", "total_us")
    text = read_text("--measured", path)
    try:
        found = json.loads(text)
        kind = StepKind(found["phase"], found["batch_size"], found["mean_seq_len"])
        rows = [row for row in found["profile"]["operations"] if "total_us" in row]
        times = [{key: row[key] for key in keys} for row in rows]
        weight_bytes = found["weight_bytes"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"--measured: {path} is not of bench step: {error!r}") from None
    if weight_bytes != model.weight_bytes():
        raise ConfigError(f"--measured: {path} is of another model")
    return kind, times
