"""The `octavo` command: one file a verb, imported only when that verb is called.

A verb module defines `add_arguments(parser)` and `run(args) -> int` (the exit status).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from octavo import __version__, env
from octavo.bench.report import columns
from octavo.errors import ConfigError, OctavoError
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


class _Interrupt(KeyboardInterrupt):
    """Ctrl-C at the program. While one is on its way, another cannot break into what it ends."""

    latest: ClassVar[Callable[[], object]] = lambda: None

    def __init__(self) -> None:
        type(self).latest = weakref.ref(self)


class _Parser(argparse.ArgumentParser):
    """One line for a bad command line, instead of the whole usage. Options are written out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"octavo: error: {message} (options: {self.prog} --help)\n")


def program() -> int:
    """`main` as a process of its own, which Ctrl-C ends once and without noise."""

    def interrupt(*_: object) -> None:
        if _Interrupt.latest() is None:
            raise _Interrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell had it ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


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
    except KeyboardInterrupt as error:
        if isinstance(error, _Interrupt):  # here, before destructors run
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130
    except (OctavoError, OSError, UnicodeError) as error:
        if not isinstance(error, OctavoError):  # a full disk, a terminal that cannot show the text
            # The rest of stdout goes nowhere; else Python complains when it flushes it at exit.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        with contextlib.suppress(OSError):  # nobody reads that, either
            print(f"octavo: error: {error}", file=sys.stderr, flush=True)
        return 2


def _run(arguments: Sequence[str]) -> int:
    """`main` but for errors."""
    if not arguments or arguments[0] not in VERBS:
        return _without_verb(arguments)
    name, rest = arguments[0], arguments[1:]
    verb = importlib.import_module(f"octavo.cli.{name}")
    parser = _Parser(prog=f"octavo {name}", description=VERBS[name])
    verb.add_arguments(parser)
    kinds = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if kinds and rest and rest[0] in kinds[0].choices:
        parser.prog += f" {rest[0]}"  # whose help has the options
    # Intermixed: prompts may stand before, between and after options.
    args = parser.parse_args(rest) if kinds else parser.parse_intermixed_args(rest)
    configure_logging(env.log_level())
    return int(verb.run(args))


def _without_verb(arguments: Sequence[str]) -> int:
    """`octavo`, `octavo --help`, `octavo --version`, or a verb that is none."""
    if arguments == ["--version"]:
        print(f"octavo {__version__}")
        return 0
    print("usage: octavo VERB ...\n")
    print(columns([(f"  {name}", summary) for name, summary in VERBS.items()]))
    print("\n`octavo VERB --help` lists the options of a verb.")
    if arguments and arguments[0] not in ("-h", "--help"):
        raise ConfigError(f"no verb {arguments[0]!r}")
    return 0
