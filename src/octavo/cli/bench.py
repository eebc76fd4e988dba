"""`octavo bench latency|throughput|prefix`: the field's metrics, and one JSON line last."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from octavo.bench import provenance
from octavo.bench.latency import run_latency
from octavo.bench.prefix import run_prefix
from octavo.bench.throughput import run_throughput
from octavo.cli.options import (
    add_engine_arguments,
    add_model_argument,
    engine_settings,
    positive,
)
from octavo.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("kind", choices=("latency", "throughput", "prefix"))
    add_model_argument(parser)
    parser.add_argument(
        "--input-len", type=int, default=128, metavar="N", help="prefix: shared tokens [128]"
    )
    parser.add_argument("--output-len", type=int, default=128, metavar="N")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="latency [8]")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="uncounted runs [1]")
    parser.add_argument(
        "--iterations", type=int, default=3, metavar="N", help="latency, prefix [3]"
    )
    parser.add_argument("--num-prompts", type=int, default=32, metavar="N", help="throughput [32]")
    parser.add_argument("--temperature", type=float, default=0.0, help="throughput [0]")
    parser.add_argument("--output-json", type=Path, help="also write the result to this file")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start an engine, measure, print."""
    for name in ("input_len", "output_len", "batch_size", "iterations", "num_prompts"):
        positive(f"--{name.replace('_', '-')}", getattr(args, name))
    start = time.perf_counter()
    # Off unless it is what is measured: repeated prompts would measure the cache.
    settings = {"enable_prefix_caching": args.kind == "prefix", **engine_settings(args)}
    with LLM(**settings) as llm:
        result: dict[str, Any] = {
            "bench": args.kind,
            "model": settings["model"],
            "dtype": llm.engine.config.model.dtype,
            "input_len": args.input_len,
            "output_len": args.output_len,
            "start_s": time.perf_counter() - start,
            **MEASURES[args.kind](llm, args),
            "environment": provenance.describe(),
        }
    line = json.dumps(result)
    if args.output_json is not None:
        args.output_json.write_text(line + "\n")
    print(line)
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
    return {"batch_size": args.batch_size, **result}


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
    return result


def measure_prefix(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """TTFT of a prompt and of a second one with the same beginning."""
    result = run_prefix(llm, shared_len=args.input_len, iterations=args.iterations)
    for name in ("cold", "warm"):
        ttft, computed = result[f"{name}_ttft_s"], result[f"{name}_computed_tokens"]
        print(f"TTFT {name}: {ttft * 1e3:.1f} ms, {computed:.0f} tokens computed")
    return result


MEASURES = {
    "latency": measure_latency,
    "throughput": measure_throughput,
    "prefix": measure_prefix,
}
