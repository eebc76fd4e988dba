"""The `octavo` command: one file a verb, imported only when that verb is called.

A verb module defines `add_arguments(parser)` and `run(args) -> int` (the exit status).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from octavo import __version__, env
from octavo.errors import OctavoError
from octavo.logging import configure_logging

VERBS = {
    "demo": "several prompts at once on a small real model, with a table of what the engine did",
    "generate": "complete prompts given as arguments, a file or standard input",
    "chat": "talk to a model in the terminal",
    "info": "parameters, KV bytes and FLOPs a token of a model, and what fits this machine",
    "explain": "each resolved setting and why, or what a step must do",
    "bench": "measure latency, throughput, the prefix cache or one GPU step",
    "kernels": "the matmul kernel lab: list, device, bench, asm, roofline, occupancy, report",
}


class _Parser(argparse.ArgumentParser):
    """One line for a bad command line, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"octavo: error: {message} (options: {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit status; a deliberate error is one line on stderr and 2.

    If whoever reads stdout has closed it, the status is 141, as for a process ended by SIGPIPE.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (stays open)
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except (OSError, UnicodeError) as error:  # a full disk, a terminal that cannot show the text
        _drop_stdout()
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    """`main` but for a closed stdout."""
    if not arguments or arguments[0] not in VERBS:
        return _without_verb(arguments)
    name, rest = arguments[0], arguments[1:]
    verb = importlib.import_module(f"octavo.cli.{name}")
    parser = _Parser(prog=f"octavo {name}", description=VERBS[name])
    verb.add_arguments(parser)
    # Intermixed: prompts may stand before, between and after options.
    nested = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    args = parser.parse_args(rest) if nested else parser.parse_intermixed_args(rest)
    try:
        configure_logging(env.log_level())
        return int(verb.run(args))
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2


def _drop_stdout() -> None:
    """Send the rest of stdout nowhere; else Python complains when it flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # stdout may have no descriptor of its own
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _without_verb(arguments: Sequence[str]) -> int:
    """`octavo`, `octavo --help`, `octavo --version`, or a verb that is none."""
    if arguments == ["--version"]:
        print(f"octavo {__version__}")
        return 0
    width = max(map(len, VERBS))
    print("usage: octavo VERB ...\n")
    for name, summary in VERBS.items():
        print(f"  {name:<{width}}  {summary}")
    print("\n`octavo VERB --help` lists the options of a verb.")
    if arguments and arguments[0] not in ("-h", "--help"):
        print(f"octavo: error: no verb {arguments[0]!r}", file=sys.stderr)
        return 2
    return 0
