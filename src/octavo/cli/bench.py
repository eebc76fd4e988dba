"""`octavo bench latency|throughput|prefix|step`: the field's metrics, and one JSON line last."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.bench import provenance
from octavo.bench.latency import run_latency
from octavo.bench.prefix import run_prefix
from octavo.bench.step import StepKind, run_step
from octavo.bench.step_report import draw_step, load_matplotlib, machine_text, summary, table
from octavo.bench.throughput import run_throughput
from octavo.cli.options import (
    add_engine_arguments,
    add_model_argument,
    at_least,
    check_writable,
    engine_settings,
    write_text,
)
from octavo.config.resolve import make_args
from octavo.config.step_cost import Machine
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.worker.device import probe_device

COUNTED_STEPS = {"decode": 50, "prefill": 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-parser a kind, each with the options that kind uses."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    latency = _add_kind(kinds, "latency", "seconds that one batch takes", measure_latency)
    _integer(latency, "--input-len", 128, "prompt tokens of a request")
    _integer(latency, "--output-len", 128, "output tokens of a request")
    _integer(latency, "--batch-size", 8, "requests of a batch")
    _integer(latency, "--warmup", 1, "uncounted batches")
    _integer(latency, "--iterations", 3, "counted batches")
    throughput = _add_kind(
        kinds, "throughput", "tokens/s of many requests submitted at once", measure_throughput
    )
    _integer(throughput, "--input-len", 128, "prompt tokens of a request")
    _integer(throughput, "--output-len", 128, "output tokens of a request")
    _integer(throughput, "--num-prompts", 32, "requests of a run")
    _integer(throughput, "--warmup", 1, "uncounted runs before the one that counts")
    prefix = _add_kind(kinds, "prefix", "time to first token, cold and warm", measure_prefix)
    _integer(prefix, "--input-len", 128, "tokens that two prompts share")
    _integer(prefix, "--iterations", 3, "pairs of prompts")
    step = _add_kind(kinds, "step", "where the time of one GPU step goes", measure_step)
    _integer(step, "--batch-size", 1, "requests of the step")
    _integer(step, "--context", 1024, "tokens of a request: cached ones, or those of its prompt")
    step.add_argument("--prefill", action="store_true", help="run whole prompts; else decode")
    step.add_argument("--steps", type=int, metavar="N", help="counted steps [50; prefill 5]")
    step.add_argument("--picture", type=Path, help="draw one step to this file (.png, .svg)")
    for kind in (throughput, step):
        kind.add_argument(
            "--temperature", type=float, default=0.0, metavar="X", help="0 is greedy [0]"
        )
    for kind in (latency, throughput, prefix, step):
        kind.add_argument("--output-json", type=Path, help="also write the result to this file")
        add_engine_arguments(kind)


def _add_kind(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    measure: Callable[[LLM, argparse.Namespace], dict[str, Any]],
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=summary, description=summary)
    parser.set_defaults(measure=measure)
    add_model_argument(parser)
    return parser


def _integer(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} [{default}]")


def run(args: argparse.Namespace) -> int:
    """Start an engine, measure, print."""
    at_least(
        1, args, "input_len", "output_len", "batch_size", "iterations", "num_prompts", "context"
    )
    at_least(0, args, "warmup")
    if args.kind in ("throughput", "step"):
        SamplingParams(temperature=args.temperature)  # refused before the model is loaded
    if args.output_json is not None:
        check_writable("--output-json", args.output_json)
    start = time.perf_counter()
    # Off unless it is what is measured: repeated prompts would measure the cache.
    settings = {"enable_prefix_caching": args.kind == "prefix", **engine_settings(args)}
    if args.kind == "step":
        settings = prepare_step(args, settings)
    with LLM(**settings) as llm:
        result: dict[str, Any] = {
            "bench": args.kind,
            "model": settings["model"],
            "dtype": llm.engine.config.model.dtype,
            "start_s": time.perf_counter() - start,
            **args.measure(llm, args),
            "environment": provenance.describe(),
        }
    line = json.dumps(result)
    print(line)
    if args.output_json is not None:
        write_text("--output-json", args.output_json, line + "\n")
    return 0


def measure_latency(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Run and print like vLLM's `bench latency`."""
    result = run_latency(
        llm,
        input_len=args.input_len,
        output_len=args.output_len,
        batch_size=args.batch_size,
        warmup=args.warmup,
        iterations=args.iterations,
    )
    print(f"Avg latency: {result['avg_latency']:.3f} seconds")
    for percent, value in result["percentiles"].items():
        print(f"{percent}% percentile latency: {value:.3f} seconds")
    return {**_lengths(args), "batch_size": args.batch_size, **result}


def measure_throughput(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Run and print like vLLM's `bench throughput`."""
    lengths = [args.input_len] * args.num_prompts, [args.output_len] * args.num_prompts
    for seed in range(args.warmup + 1):
        result = run_throughput(
            llm,
            input_lens=lengths[0],
            output_lens=lengths[1],
            temperature=args.temperature,
            seed=seed,
        )
    print(
        f"Throughput: {result['requests_per_s']:.2f} requests/s, "
        f"{result['total_tokens_per_s']:.2f} total tokens/s, "
        f"{result['output_tokens_per_s']:.2f} output tokens/s"
    )
    return {**_lengths(args), **result}


def measure_prefix(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """TTFT of a prompt and of a second one with the same beginning."""
    result = run_prefix(llm, shared_len=args.input_len, iterations=args.iterations)
    for name in ("cold", "warm"):
        ttft, computed = result[f"{name}_ttft_s"], result[f"{name}_computed_tokens"]
        print(f"TTFT {name}: {ttft * 1e3:.1f} ms, {computed:.0f} tokens computed")
    return result


def prepare_step(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with room for the step. Raises ConfigError for what cannot be measured or drawn."""
    args.phase = "prefill" if args.prefill else "decode"
    args.steps = COUNTED_STEPS[args.phase] if args.steps is None else args.steps
    at_least(1, args, "steps")
    device = probe_device(make_args(settings).device)
    if device.kind != "cuda":
        raise ConfigError(
            f"bench step measures GPU kernels; {device.kind} ({device.name}) runs none"
        )
    if args.picture is not None:
        load_matplotlib()
        check_writable("--picture", args.picture)
    room: dict[str, Any] = {"skip_tokenizer_init": True}
    if args.batch_size > 256:
        room["max_num_seqs"] = args.batch_size
    if args.prefill:
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


def _lengths(args: argparse.Namespace) -> dict[str, int]:
    return {"input_len": args.input_len, "output_len": args.output_len}
