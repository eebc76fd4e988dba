"""From what the user said and what the machine is to a concrete EngineConfig, with reasons. Pure."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, Literal

from octavo.config.engine import (
    CacheConfig,
    Decision,
    EngineArgs,
    EngineConfig,
    LinearBackend,
    SchedulerConfig,
)
from octavo.config.model import ModelConfig
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_VOCAB = 2**19  # whose fixed-point sums fit in 63 bits (sample/logprobs.py)
AS_GIVEN = "as given"
CPU_POOL_BYTES = 4 << 30
CPU_POOL_SHARE = 0.5  # of free memory: the rest is for the caller's own program
GPU_MEMORY_UTILIZATION = 0.92  # as vLLM's
GPU_HEAD_DIMS = (64, 96, 128, 256)
GPU_BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The machine, as numbers."""

    kind: Literal["cpu", "cuda"]
    name: str
    num_threads: int
    available_bytes: int
    """Free memory of the device."""
    total_bytes: int = 0
    """GPU: all its memory."""
    own_kernels: bool = False
    """CPU: it can run those of kernels/cpu, if there is a compiler."""


class _Log:
    """Collects one Decision per setting."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self.decisions: list[Decision] = []

    def pick(self, name: str, default: Any = None, reason: str = "the default") -> Any:
        """The setting if one was given, else `default` or its fixed default; noted either way."""
        value, fixed = getattr(self._args, name), EngineArgs.__dataclass_fields__[name].default
        if value != fixed:
            reason = AS_GIVEN
        elif default is not None:
            value = default
        self.decisions.append(Decision(name, str(value), reason))
        return value


def make_args(settings: dict[str, Any]) -> EngineArgs:
    """EngineArgs from keyword arguments; unknown names raise ConfigError too."""
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := ", ".join(sorted(set(settings) - known)):
        raise ConfigError(f"unknown setting {unknown}; known: {', '.join(sorted(known))}")
    return EngineArgs(**settings)


def resolve(args: EngineArgs, model: ModelConfig, facts: DeviceFacts) -> EngineConfig:
    """Decide every setting. Raises ConfigError naming the setting that cannot work."""
    log = _Log(args)
    log.pick("device", facts.kind, facts.name)
    dtype_reason = "as stored; bfloat16 if quantised"
    if facts.kind == "cuda":
        if args.dtype == "auto" and model.dtype == "float32":
            model = dataclasses.replace(model, dtype="bfloat16")
            dtype_reason = "stored as float32, which the GPU kernels do not take"
        _check_gpu_shapes(args, model)
    log.pick("dtype", model.dtype, dtype_reason)
    log.pick("generation_config")
    if model.sampling_defaults:
        defaults = ", ".join(f"{name}={value}" for name, value in model.sampling_defaults)
        reason = "the model's generation_config.json"
        log.decisions.append(Decision("sampling_defaults", defaults, reason))
    linear_backend = _resolve_linear_backend(args, facts, log)
    log.pick("enforce_eager")
    scheduler = _resolve_scheduler(args, model, facts, log)
    if model.rope.kind == "longrope":
        # A pool too small for that context changes nothing: the model is loaded by then.
        longest, original = scheduler.max_model_len, model.rope.original_max_position_embeddings
        chosen, relation = ("long", "beyond") if longest > original else ("short", "within")
        reason = f"max_model_len={longest} is {relation} the original context of {original}"
        log.decisions.append(Decision("longrope_factors", chosen, reason))
        model = model.for_context(longest)
    share = args.gpu_memory_utilization
    if facts.kind == "cuda":
        share = log.pick("gpu_memory_utilization", GPU_MEMORY_UTILIZATION)
    cache = CacheConfig(
        block_size=log.pick("block_size"),
        enable_prefix_caching=log.pick("enable_prefix_caching"),
        gpu_memory_utilization=share,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        num_blocks_override=args.num_gpu_blocks_override,
        group_windows=tuple(model.window(group[0]) for group in model.layer_groups()),
    )
    return EngineConfig(
        model=model,
        cache=cache,
        scheduler=scheduler,
        device=facts.kind,
        seed=log.pick("seed"),
        max_logprobs=log.pick("max_logprobs"),
        linear_backend=linear_backend,
        enforce_eager=args.enforce_eager,
        decisions=tuple(log.decisions),
    )


def _check_gpu_shapes(args: EngineArgs, model: ModelConfig) -> None:
    """Raises ConfigError naming what the GPU kernels are not made for."""
    if model.dtype == "float32":
        raise ConfigError("dtype='float32' runs on the CPU only; use 'bfloat16' or 'float16'")
    if model.encoder is None and model.head_dim not in GPU_HEAD_DIMS:
        taken = f"none of {GPU_HEAD_DIMS}, which the GPU kernels take; use device='cpu'"
        raise ConfigError(f"head_dim={model.head_dim} of {model.path} is {taken}")
    sizes = {n: getattr(model, n) for n in ("vocab_size", "hidden_size", "intermediate_size")}
    if model.encoder is not None:
        del sizes["vocab_size"]  # it has no lm_head
    way_out = "linear_backend='fixed' needs; use 'cublas'"
    if model.moe is not None:  # their products have one kernel
        sizes["moe_intermediate_size"] = model.moe.intermediate_size
        sizes["shared_expert_intermediate_size"] = model.moe.shared_intermediate_size
        way_out = "mixtures of experts need on a GPU; use device='cpu'"
    for name, size in sizes.items():
        if size % 8 and (model.moe is not None or args.linear_backend != "cublas"):
            raise ConfigError(f"{name}={size} of {model.path} is no multiple of 8, which {way_out}")
    if model.vocab_size > MAX_VOCAB:
        raise ConfigError(f"vocab_size={model.vocab_size} of {model.path} is more than {MAX_VOCAB}")
    if args.block_size not in GPU_BLOCK_SIZES:
        raise ConfigError(f"block_size={args.block_size} is none of {GPU_BLOCK_SIZES} on a GPU")


def _resolve_linear_backend(args: EngineArgs, facts: DeviceFacts, log: _Log) -> LinearBackend:
    tiled = args.linear_backend == "tiled"
    if args.linear_backend != "auto" and tiled != (facts.kind == "cpu"):
        only = "a CPU" if tiled else "a GPU"
        raise ConfigError(f"linear_backend={args.linear_backend!r} runs on {only} only")
    default, reason = "fixed", "one arithmetic for any batch; cublas is faster, not repeatable"
    if facts.kind == "cpu":
        how = (
            "our own kernels (without gcc: torch)"
            if facts.own_kernels
            else "torch, fixed row tiles"
        )
        default, reason = "tiled", f"{how}: results do not depend on the batch"
    picked: LinearBackend = log.pick("linear_backend", default, reason)
    return picked


def _resolve_scheduler(
    args: EngineArgs, model: ModelConfig, facts: DeviceFacts, log: _Log
) -> SchedulerConfig:
    limit = model.max_position_embeddings
    max_model_len = log.pick("max_model_len", limit, "the model's context")
    if max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the model's context of {limit}"
        )
    seqs, tokens, reason = 256, 8192, "enough to fill the GPU's tensor cores"
    if facts.kind == "cpu":
        seqs, tokens = 64, 512
        reason = "short steps on a CPU, so that running streams stay smooth"
    if model.encoder is not None and max_model_len > tokens:
        tokens, reason = max_model_len, "a text of any length in one step"
    max_num_seqs = log.pick("max_num_seqs", seqs, f"default on a {facts.kind.upper()}")
    budget = log.pick("max_num_batched_tokens", max(tokens, max_num_seqs), reason)
    too_small = f"max_num_batched_tokens={budget} is less than"
    if budget < max_num_seqs:
        rule = "a step must be able to run one token of every request"
        raise ConfigError(f"{too_small} max_num_seqs={max_num_seqs}: {rule}")
    if model.encoder is not None and budget < max_model_len:
        rule = "an embedding model runs a text in one step"
        raise ConfigError(f"{too_small} max_model_len={max_model_len}: {rule}")
    slot_bytes = 4 * max_num_seqs * max_model_len  # the runner's token history
    if slot_bytes > facts.available_bytes // 2:
        needed, free = (size / 2**30 for size in (slot_bytes, facts.available_bytes))
        raise ConfigError(
            f"max_num_seqs={max_num_seqs} requests of max_model_len={max_model_len} tokens need "
            f"{needed:.1f} GiB for their tokens alone; {free:.1f} GiB are free"
        )
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        long_prefill_token_threshold=log.pick("long_prefill_token_threshold"),
        policy=log.pick("scheduling_policy"),
        async_scheduling=log.pick(
            "async_scheduling", True, "planning hides behind the running step"
        ),
    )


def size_kv_pool(
    config: EngineConfig, block_bytes: int, available_bytes: int
) -> tuple[int, Decision]:
    """Blocks of the pool, the null block included, given the memory left after a full-size step.

    block_bytes: one block over the layers of a group; available_bytes: on a GPU what is left of its
    gpu_memory_utilization. Raises ConfigError with what would fit.
    """
    cache, scheduler = config.cache, config.scheduler
    if (asked := cache.num_blocks_override) is not None:
        if asked * block_bytes > available_bytes:
            raise ConfigError(
                f"num_gpu_blocks_override={asked} blocks of {block_bytes} bytes are more than the "
                f"{available_bytes} bytes that are free"
            )
        return asked, Decision("kv_pool", f"{asked} blocks", "num_gpu_blocks_override")
    layout = cache.layout(scheduler.max_num_batched_tokens)
    useful = scheduler.max_num_seqs * layout.peak_blocks(scheduler.max_model_len) + 1
    if cache.kv_cache_memory_bytes is not None:
        size, reason = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif config.device == "cuda":
        size = available_bytes
        reason = f"{size / 2**30:.1f} GiB left of gpu_memory_utilization"
    elif cache.gpu_memory_utilization is not None:
        size = int(cache.gpu_memory_utilization * available_bytes)
        reason = f"gpu_memory_utilization of {available_bytes / 2**30:.1f} GiB free"
    else:
        size = int(min(CPU_POOL_BYTES, CPU_POOL_SHARE * available_bytes))
        reason = f"half of {available_bytes / 2**30:.1f} GiB free, at most 4 GiB"
    fitting = size // block_bytes
    if fitting < 2:
        raise ConfigError(
            f"no KV cache fits: one block of {cache.block_size} tokens takes {block_bytes} bytes and "
            f"{size} are there ({reason}); two blocks are the least"
        )
    num_blocks = fitting if config.device == "cuda" else min(fitting, useful)
    if num_blocks * block_bytes > available_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes={size} is more than the {available_bytes} bytes that are free"
        )
    if num_blocks == useful:
        reason = "all that max_num_seqs requests of max_model_len can use"
    tokens = (num_blocks - 1) // len(cache.group_windows) * cache.block_size
    return num_blocks, Decision("kv_pool", f"{num_blocks} blocks, {tokens} tokens", reason)


def estimate_pool(config: EngineConfig, facts: DeviceFacts) -> tuple[int, Decision]:
    """`size_kv_pool` before anything is loaded: weights are subtracted, activations are not."""
    spec = config.model.kv_cache_spec(config.cache.block_size)
    left = engine_share(config, facts) - config.model.weight_bytes()
    num_layers = len(config.model.layer_groups()[0])
    return size_kv_pool(config, num_layers * spec.block_bytes, max(0, left))


def engine_share(config: EngineConfig, facts: DeviceFacts) -> int:
    """Bytes that the engine may still take: all that is free, less what it must leave on a GPU."""
    share = config.cache.gpu_memory_utilization
    if config.device == "cpu" or share is None:
        return facts.available_bytes
    return facts.available_bytes - int((1.0 - share) * facts.total_bytes)


def finalise(config: EngineConfig, num_blocks: int, pool: Decision) -> EngineConfig:
    """The config once the pool is known: one context limit for admission and for everything else.

    A context that was asked for and does not fit raises ConfigError; the model's own is lowered.
    """
    scheduler, decisions = config.scheduler, [*config.decisions, pool]
    layout = config.cache.layout(scheduler.max_num_batched_tokens)
    capacity = layout.most_tokens(num_blocks - 1, scheduler.max_model_len)
    if capacity < scheduler.max_model_len:
        [asked] = [decision for decision in decisions if decision.name == "max_model_len"]
        if asked.reason == AS_GIVEN:
            raise ConfigError(
                f"max_model_len={asked.value}: the KV pool holds {capacity} tokens ({pool.reason})"
            )
        lowered = Decision(asked.name, str(capacity), "lowered to what the KV pool can hold")
        decisions[decisions.index(asked)] = lowered
        scheduler = dataclasses.replace(scheduler, max_model_len=capacity)
    for decision in decisions:
        logger.info("%s = %s (%s)", decision.name, decision.value, decision.reason)
    return dataclasses.replace(config, scheduler=scheduler, decisions=tuple(decisions))
