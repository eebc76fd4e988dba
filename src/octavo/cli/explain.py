"""`octavo explain`: each resolved setting and why, without loading weights."""

from __future__ import annotations

import argparse
import json

from octavo.cli.options import add_engine_arguments, add_model_argument, engine_settings
from octavo.config.resolve import estimate_pool, finalise, make_args, resolve
from octavo.weights.checkpoint import load_model_config
from octavo.worker.device import probe_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="a JSON list on stdout")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line a decision."""
    settings = make_args(engine_settings(args))
    model = load_model_config(settings)
    facts = probe_device(settings.device)
    config = resolve(settings, model, facts)
    config = finalise(config, *estimate_pool(config, facts))
    if args.json:
        rows = [{"name": d.name, "value": d.value, "reason": d.reason} for d in config.decisions]
        print(json.dumps(rows))
        return 0
    width = max(len(decision.name) for decision in config.decisions)
    value_width = max(len(decision.value) for decision in config.decisions)
    for decision in config.decisions:
        print(f"{decision.name:<{width}}  {decision.value:<{value_width}}  {decision.reason}")
    return 0
