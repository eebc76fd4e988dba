"""`octavo chat`: a conversation in the terminal, streamed; lines that begin with / are commands."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from contextlib import closing
from typing import Any

from octavo.cli import options
from octavo.errors import InvalidRequestError
from octavo.llm import LLM
from octavo.outputs import RequestOutput

# A chat shows one answer, as text.
UNUSED = ("n", "logprobs", "prompt_logprobs")
OPTIONS = tuple(name for name in options.SAMPLING_FIELDS if name not in UNUSED)
FIELDS = (*OPTIONS, "seed")
HELP = """/help            this list
/system TEXT     set the system message and start anew
/reset           forget the conversation
/undo            drop the last question and answer
/set NAME VALUE  change a sampling parameter, e.g. /set temperature 0
/params          show the sampling parameters
/stats           timing and cache use of the last answer
/exit            leave (also Ctrl-D); Ctrl-C stops an answer or a command"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser)
    parser.add_argument("--system", help="system message")
    options.add_sampling_arguments(parser, OPTIONS, max_tokens=1024, temperature=0.7, top_p=0.95)
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read lines until the end of input or /exit.

    Ctrl-C stops an answer. Beside one, it ends the command or the line at a terminal, where a hint
    says how to leave, and the chat where a script is read.
    """
    options.sampling_params(args)  # refused before the model is loaded
    with LLM(**options.engine_settings(args)) as llm:
        params = options.sampling_params(args, llm.engine.config.model.sampling_defaults)
        session = Session(llm, params, args.system)
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            print(f"{args.model}: type a message, or /help")
        while True:
            try:
                line = _read_line("> " if at_terminal else "")
                if line is None or line == "/exit":
                    return 0
                if line:
                    session.handle(line)
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                print("\n(Ctrl-D or /exit leaves)")


class Session:
    """One conversation and its settings."""

    def __init__(self, llm: LLM, params: Any, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._last: RequestOutput | None = None
        self._start(system)

    def handle(self, line: str) -> None:
        """One line of input: a command or a message. Errors are shown, the session goes on."""
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self._answer(line)
        except InvalidRequestError as error:
            print(f"! {error}")

    def _start(self, system: str | None) -> None:
        self._system = system
        said = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = said

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            print(HELP)
        elif name == "/reset":
            self._start(self._system)
        elif name == "/system":
            self._start(rest.strip() or None)
        elif name == "/undo":
            self.messages = self.messages[:-2] if len(self.messages) >= 2 else self.messages
        elif name == "/set":
            self._set(rest)
        elif name == "/params":
            for field in FIELDS:
                print(f"  {field} = {getattr(self._params, field)!r}")
        elif name == "/stats":
            print(describe(self._last) if self._last else "no answer yet")
        else:
            print(f"! no command {name}; /help lists them")

    def _set(self, rest: str) -> None:
        name, _, value = rest.strip().partition(" ")
        if name not in FIELDS or name == "stop":
            raise InvalidRequestError(name or "/set", "is not a sampling parameter that can be set")
        text = value.strip()
        try:
            parsed = ast.literal_eval(text.capitalize())  # "none" and "true" too
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise InvalidRequestError(name, f"{text!r} is not a value") from None
        self._params = dataclasses.replace(self._params, **{name: parsed})

    def _answer(self, text: str) -> None:
        """Show an answer as it grows. A failed one, or one without text, leaves no trace."""
        asked = [*self.messages, {"role": "user", "content": text}]
        self._last = None
        answer = ""
        try:
            with closing(self._llm.stream(self._llm.render_chat(asked), self._params)) as stream:
                for output in stream:
                    piece = output.outputs[0].text
                    answer += piece
                    print(piece, end="", flush=True)
                    self._last = output
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print()
        if self._last is not None and (error := self._last.outputs[0].error):
            print(f"! {error}")
        elif answer:
            self.messages = [*asked, {"role": "assistant", "content": answer}]


def describe(output: RequestOutput) -> str:
    """Timing and cache use of one request, in one line."""
    metrics = output.metrics
    parts = [f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} from cache"]
    if metrics is not None:
        parts.append(f"{metrics.num_generation_tokens} output tokens")
        if metrics.ttft is not None:
            parts.append(f"first after {metrics.ttft * 1e3:.0f} ms")
        if metrics.tpot is not None:
            parts.append(f"then {1 / metrics.tpot:.1f} tokens/s")
    return ", ".join(parts)


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise InvalidRequestError("stdin", "is not text") from None
