"""`octavo info`: what a model is and what of it fits this machine, without loading its weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from octavo.bench.report import columns
from octavo.cli.options import add_engine_arguments, add_model_argument, engine_settings
from octavo.config.engine import EngineArgs
from octavo.config.model import ModelConfig
from octavo.config.resolve import DeviceFacts, estimate_pool, make_args, resolve
from octavo.errors import ConfigError
from octavo.weights.checkpoint import load_model_config
from octavo.worker.device import probe_device

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = make_args(engine_settings(args))
    model = load_model_config(settings)
    facts = probe_device(settings.device)
    rows = {**describe(model, facts), **describe_pool(settings, model, facts)}
    shown = [(name.replace("_", " "), str(value)) for name, value in rows.items()]
    print(json.dumps(rows) if args.json else columns(shown))
    return 0


def describe_pool(settings: EngineArgs, model: ModelConfig, facts: DeviceFacts) -> dict[str, str]:
    """The KV cache that would fit beside the weights, if it has one, or why there is no room.

    Raises ConfigError for settings that work on no machine.
    """
    resolve(settings, model, dataclasses.replace(facts, available_bytes=sys.maxsize))
    if model.encoder is not None:
        return {}
    try:
        config = resolve(settings, model, facts)
        num_blocks, pool = estimate_pool(config, facts)
    except ConfigError as error:
        return {"kv_pool": str(error), "requests_of_full_context": "0.0"}
    scheduler = config.scheduler
    layout = config.cache.layout(scheduler.max_num_batched_tokens)
    requests = (num_blocks - 1) / layout.peak_blocks(scheduler.max_model_len)
    return {
        "kv_pool": f"{pool.value} ({pool.reason})",
        "requests_of_full_context": f"{requests:.1f}",
    }


def describe(model: ModelConfig, facts: DeviceFacts) -> dict[str, Any]:
    """Sizes and costs of the model on this machine, as printable values."""
    context, moe, encoder = model.max_position_embeddings, model.moe, model.encoder
    experts = {}
    if moe is not None:
        experts = {
            "active_parameters": f"{model.num_parameters(active=True):,} for each token",
            "experts": f"{moe.num_experts}, {moe.experts_per_token} for each token, "
            f"in {model.num_layers - len(moe.dense_layers)} layers",
        }
    pooling_or_cache = {"kv_bytes_per_token": f"{model.kv_bytes_per_token():,}"}
    if encoder is not None:
        normalized = "normalized" if encoder.normalize else "not normalized"
        pooling_or_cache = {"pooling": f"{encoder.pooling_type}, {normalized}"}
    return {
        "model": str(model.path),
        "architecture": model.architecture,
        "parameters": f"{model.num_parameters():,}",
        **experts,
        "weights": f"{model.weight_bytes() / GIB:.2f} GiB as {model.dtype}",
        "layers": f"{model.num_layers} of hidden size {model.hidden_size}, "
        f"{model.num_heads} heads, {model.num_kv_heads} KV heads, head_dim {model.head_dim}",
        "vocabulary": f"{model.vocab_size:,}",
        "context": f"{context:,} tokens",
        **pooling_or_cache,
        "flops_per_token": f"{model.flops_per_token(1) / 1e9:.2f} GFLOP at context 1, "
        f"{model.flops_per_token(context) / 1e9:.2f} at {context:,}",
        "machine": f"{facts.name}, {facts.num_threads} threads, "
        f"{facts.available_bytes / GIB:.1f} GiB free",
    }
