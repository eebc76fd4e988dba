"""`octavo bench latency|throughput|prefix|step`: the field's metrics, and one JSON line last."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from octavo.bench import offline, provenance
from octavo.bench.step import StepKind, run_step
from octavo.bench.step_report import draw_step, machine_text, summary, table
from octavo.cli import options
from octavo.config.resolve import make_args
from octavo.config.step_cost import Machine
from octavo.errors import ConfigError
from octavo.inspect.page import render, style
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.worker.device import probe_device

# Options that are numbers: default, meaning, least if not 1.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "input_len": (128, "prompt tokens of a request; prefix: those that two prompts share"),
    "output_len": (128, "output tokens of a request"),
    "batch_size": (8, "requests of a batch"),
    "num_prompts": (32, "requests of a run"),
    "warmup": (1, "uncounted batches or runs before", 0),
    "iterations": (3, "counted batches or pairs of prompts"),
}
# What a kind measures and by what function, whose parameters are its options.
KINDS: dict[str, tuple[str, Callable[..., dict[str, Any]] | None]] = {
    "latency": ("seconds that one batch takes", offline.run_latency),
    "throughput": ("tokens/s of many requests submitted at once", offline.run_throughput),
    "prefix": ("time to first token, cold and warm", offline.run_prefix),
    "step": ("where the time of one GPU step goes", None),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-parser a kind, each with the options that kind uses."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (text, measure) in KINDS.items():
        kind = kinds.add_parser(name, help=text, description=text)
        options.add_model_argument(kind)
        add = kind.add_argument
        for number in signature(measure).parameters if measure else ():
            if number in NUMBERS:
                options.add_number(kind, number, *NUMBERS[number])
        if measure is None:
            options.add_step_arguments(kind)
            add("--steps", type=options.integer, metavar="N", help="counted steps [50; prefill 5]")
            add("--picture", type=Path, help="draw one step to this file (.png, .svg)")
        if name in ("throughput", "step"):
            add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy [0]")
        add("--output-json", type=Path, help="also write the result to this file")
        options.add_engine_arguments(kind)


def run(args: argparse.Namespace) -> int:
    measure = KINDS[args.kind][1]
    taken = signature(measure).parameters if measure else ()
    asked = {name: value for name, value in vars(args).items() if name in taken}
    numbers = {name: value for name, value in asked.items() if name in NUMBERS}
    if args.kind in ("throughput", "step"):
        SamplingParams(temperature=args.temperature)  # refused before the model is loaded
    if args.output_json is not None:
        options.check_writable("--output-json", args.output_json)
    start = time.perf_counter()
    # Off unless it is what is measured: repeated prompts would measure the cache.
    settings = {"enable_prefix_caching": args.kind == "prefix", **options.engine_settings(args)}
    if measure is None:
        settings = prepare_step(args, settings)
    with LLM(**settings) as llm:
        result: dict[str, Any] = {
            "bench": args.kind,
            "model": settings["model"],
            "dtype": llm.engine.config.model.dtype,
            "start_s": time.perf_counter() - start,
            **numbers,
        }
        result |= measure(llm, **asked) if measure else measure_step(llm, args)
    if measure:
        print(render("bench.txt", **result), end="")
    line = json.dumps(result | {"environment": provenance.describe()})
    print(line)
    if args.output_json is not None:
        options.write_text("--output-json", args.output_json, line + "\n")
    return 0


def prepare_step(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with room for the step. Raises ConfigError for what cannot be measured or drawn."""
    if args.steps is None:
        args.steps = 5 if args.phase == "prefill" else 50
    device = probe_device(make_args(settings).device)
    if device.kind != "cuda":
        raise ConfigError(
            f"bench step measures GPU kernels; {device.kind} ({device.name}) runs none"
        )
    if args.picture is not None:
        with style():  # or it says what is missing
            pass
        options.check_writable("--picture", args.picture)
    room: dict[str, Any] = {"skip_tokenizer_init": True}
    if args.batch_size > 256:
        room["max_num_seqs"] = args.batch_size
    if args.phase == "prefill":
        room["max_num_batched_tokens"] = max(8192, args.batch_size * args.context)
    return {**room, **settings}


def measure_step(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one kind of step; print where its time goes, and draw it if asked."""
    kind = StepKind(args.phase, args.batch_size, args.context, args.temperature)
    result, found = run_step(llm, kind, args.steps)
    rows = result["profile"]["operations"]
    print(f"{summary(result)}\n{table(rows)}\n{machine_text(Machine(**result['machine']))}")
    if args.picture is not None:
        title = f"{kind.phase}, {kind.batch_size} x {kind.context} tokens"
        draw_step(args.picture, found.steps[len(found.steps) // 2], rows, title)
    return result
