"""The `octavo` command: one file a verb, imported only when that verb is called.

A verb module defines `add_arguments(parser)` and `run(args) -> int` (the exit status).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from octavo import env
from octavo.errors import OctavoError
from octavo.logging import configure_logging

VERBS = {
    "demo": "several prompts at once on a small real model, with a table of what the engine did",
    "generate": "complete prompts given as arguments, a file or standard input",
    "chat": "talk to a model in the terminal",
    "info": "parameters, KV bytes and FLOPs a token of a model, and what fits this machine",
    "explain": "each resolved setting and why",
    "bench": "measure latency or throughput",
    "kernels": "the matmul kernel lab: list, bench, asm, roofline, report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit status; a deliberate error is one line on stderr and 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="octavo", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        if name == chosen:
            module = importlib.import_module(f"octavo.cli.{name}")
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        configure_logging(env.log_level())
        return int(args.run(args))
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
