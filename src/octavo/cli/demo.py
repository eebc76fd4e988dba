"""`octavo demo`: a small real model answers several prompts at once, streaming, and shows its work."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.bench.report import columns
from octavo.cli import options
from octavo.core.scheduler_output import SchedulerStats
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.weights.hub import DEMO

QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits and their colours.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python list comprehension that squares the even numbers below 20.",
    "Give me a haiku about rain.",
    "What does a computer's cache do?",
)
LINE_WIDTH = 72  # characters of one answer collected before a tagged line is printed
Add = Callable[[int, str, bool], None]
"""Appends text to the answer of that index; True: it is the last of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="your own prompts instead")
    options.add_number(parser, "max_tokens", 96, "most tokens of an answer")
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load, stream, print the tables. Exit status 0, or 1 if a request ended with an error."""
    start = time.perf_counter()
    questions = list(args.prompts) or list(QUESTIONS)
    print(f"Loading SmolLM2-135M-Instruct for {len(questions)} prompts ...", flush=True)
    with LLM(**{"model": DEMO, **options.engine_settings(args)}) as llm:
        print(f"Ready after {time.perf_counter() - start:.1f} s.\n", flush=True)
        prompts = llm.render_chat([[{"role": "user", "content": text}] for text in questions])
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        began = time.perf_counter()
        last: dict[int, RequestOutput] = {}
        show = show_panels if sys.stdout.isatty() else show_lines
        with show(questions) as add:
            for output in llm.stream(prompts, params):
                index = int(output.request_id)
                last[index] = output
                add(index, output.outputs[0].text, output.finished)
        elapsed = time.perf_counter() - began
        outputs = [last[index] for index in sorted(last)]
        print(request_table(outputs))
        print(engine_table(outputs, list(llm.engine.core.step_log), elapsed))
    failed = [output for output in outputs if output.outputs[0].error]
    for output in failed:
        print(f"! [{int(output.request_id) + 1}] {output.outputs[0].error}")
    return int(bool(failed))


@contextmanager
def show_lines(questions: Sequence[str]) -> Iterator[Add]:
    """Prints `[k] text` whenever answer k has a line's worth of new text, or ends."""
    pending = [""] * len(questions)

    def add(index: int, piece: str, finished: bool) -> None:
        lines = (pending[index] + piece).split("\n")
        if finished or len(lines[-1]) >= LINE_WIDTH:
            lines.append("")
        pending[index] = lines.pop()
        for line in lines:
            if line.strip():
                print(f"[{index + 1}] {line}", flush=True)

    for index, question in enumerate(questions):
        print(f"[{index + 1}] > {question}")
    print(flush=True)
    try:
        yield add
    finally:
        print()


@contextmanager
def show_panels(questions: Sequence[str]) -> Iterator[Add]:
    """One panel an answer, redrawn in place. Needs the `demo` extra."""
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.panel import Panel
        from rich.text import Text
    except ImportError:
        raise ConfigError("the demo's panels need rich: pip install -e '.[demo]'") from None
    answers = [""] * len(questions)
    colours = ["cyan"] * len(questions)

    def add(index: int, piece: str, finished: bool) -> None:
        answers[index] += piece
        colours[index] = "green" if finished else "cyan"

    def render() -> Group:
        each = zip(questions, answers, colours, strict=True)
        return Group(
            *(Panel(Text(a.strip()), title=Text(q), border_style=colour) for q, a, colour in each)
        )

    with Live(refresh_per_second=12, get_renderable=render):
        yield add


def request_table(outputs: list[RequestOutput]) -> str:
    """One row a request: tokens in, from cache and out, TTFT, tokens/s."""
    rows = [["request", "prompt", "cached", "output", "TTFT ms", "tok/s", "end"]]
    for index, output in enumerate(outputs):
        metrics = output.metrics
        assert metrics is not None, "the engine fills in metrics"
        prompt = len(output.prompt_token_ids), output.num_cached_tokens
        ttft = "-" if metrics.ttft is None else f"{metrics.ttft * 1e3:.0f}"
        speed = "-" if metrics.tpot is None else f"{1 / metrics.tpot:.1f}"
        end = output.outputs[0].finish_reason
        cells = index + 1, *prompt, metrics.num_generation_tokens, ttft, speed, end
        rows.append([str(cell) for cell in cells])
    return columns(rows) + "\n"


def engine_table(outputs: list[RequestOutput], steps: list[SchedulerStats], elapsed: float) -> str:
    """What the engine did over all requests: throughput, batch composition, KV blocks."""
    produced = sum(out.metrics.num_generation_tokens for out in outputs if out.metrics)
    ran = [step for step in steps if step.num_scheduled_tokens]
    if not ran:
        return columns([("output tokens/s, all requests", "0.0"), ("steps", "0")]) + "\n"
    prefill = sum(step.num_prefill_tokens for step in ran)
    decode = sum(step.num_scheduled_tokens for step in ran) - prefill
    mixed = sum(0 < step.num_prefill_tokens < step.num_scheduled_tokens for step in ran)
    used = max(step.num_blocks - step.num_free_blocks for step in ran)
    mean = f"{prefill / len(ran):.1f} prefill + {decode / len(ran):.1f} decode"
    rows = [
        ("output tokens/s, all requests", f"{produced / elapsed:.1f}"),
        ("steps", f"{len(ran)} ({mixed} mixed prefill and decode)"),
        ("batch, mean tokens a step", mean),
        ("batch, largest step", f"{max(step.num_scheduled_tokens for step in ran)} tokens"),
        ("requests at once", str(max(step.num_running for step in ran))),
        ("KV blocks used at most", f"{used} of {ran[-1].num_blocks}"),
        ("prompt tokens from the prefix cache", f"{ran[-1].prefix_cache_hits}"),
    ]
    return columns(rows) + "\n"
