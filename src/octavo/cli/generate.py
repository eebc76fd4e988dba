"""`octavo generate`: complete prompts given as arguments, one a line in a file, or on stdin."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo import files
from octavo.cli import options
from octavo.errors import InvalidRequestError
from octavo.llm import LLM
from octavo.outputs import Logprob, RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser)
    text = "none, or -: one a line from stdin"
    parser.add_argument("prompts", nargs="*", default=[], metavar="PROMPT", help=text)
    parser.add_argument("--file", type=Path, help="a file with one prompt a line")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt as a user message")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout")
    options.add_sampling_arguments(parser, max_tokens=128)
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0, or 1 if a request ended with an error."""
    prompts = read_prompts(args)
    options.sampling_params(args)  # refused before the model is loaded
    with LLM(**options.engine_settings(args)) as llm:
        params = options.sampling_params(args, llm.engine.config.model.sampling_defaults)
        asked = [[{"role": "user", "content": text}] for text in prompts]
        wrapped: Any = llm.render_chat(asked) if args.chat else prompts
        outputs = llm.generate(wrapped, params, use_tqdm=sys.stderr.isatty())
    for prompt, output in zip(prompts, outputs, strict=True):
        print(json.dumps(as_json(prompt, output)) if args.json else as_text(prompt, output))
    return int(any(completion.error for output in outputs for completion in output.outputs))


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Raises InvalidRequestError if there are none, ConfigError if they cannot be read as text."""
    prompts = [one for one in args.prompts if one != "-"]
    if args.file is not None:
        prompts += filter(None, files.read_text("--file", args.file).splitlines())
    if "-" in args.prompts or not (args.prompts or args.file):
        prompts += filter(None, files.read_all("stdin:", sys.stdin).splitlines())
    if not prompts:
        raise InvalidRequestError("PROMPT", "no prompt in the arguments, --file or stdin")
    return prompts


def as_text(prompt: str, output: RequestOutput) -> str:
    """Prompt and completions for a person, each followed by its scores if they were asked for."""
    parts = [f"> {prompt}", *score_lines(output.prompt_logprobs)]
    for completion in output.outputs:
        parts += [f"[{completion.index + 1}]"] if len(output.outputs) > 1 else []
        parts.append(completion.text.strip() if completion.error is None else completion.error)
        parts += score_lines(completion.logprobs)
    return "\n".join(parts) + "\n"


def score_lines(entries: Sequence[dict[int, Logprob] | None] | None) -> list[str]:
    """One line a position: the token that stands there and its logprob, then the most likely ones."""
    return [
        "    " + " | ".join(f"{one.logprob:.4f} {one.decoded_token!r}" for one in entry.values())
        for entry in entries or ()
        if entry is not None  # nothing predicts the first token of a prompt
    ]


def as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """The whole result as JSON values."""
    metrics = output.metrics
    plain = ("text", "token_ids", "finish_reason", "stop_reason", "error")
    return {
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "outputs": [
            {name: getattr(one, name) for name in plain} | {"logprobs": _scores(one.logprobs)}
            for one in output.outputs
        ],
        "prompt_logprobs": _scores(output.prompt_logprobs),
        "ttft_s": metrics.ttft if metrics else None,
        "e2e_s": metrics.e2e if metrics else None,
    }


def _scores(entries: Any) -> list[dict[int, float] | None] | None:
    return entries and [
        entry and {token: score.logprob for token, score in entry.items()} for entry in entries
    ]
