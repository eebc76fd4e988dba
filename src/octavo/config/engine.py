"""Engine settings: what a user may say (EngineArgs) and what was resolved from it (EngineConfig).

Resolved sections are frozen and never written back; `config/resolve.py` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from octavo.config.kv_cache import KVCacheLayout
from octavo.config.model import ModelConfig
from octavo.errors import ConfigError, shown

LinearBackend = Literal["tiled", "cublas", "fixed"]
"""How x W^T is computed: tiled on a CPU; on a GPU cuBLAS, or one Triton arithmetic for any rows."""


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Settings by the names vLLM gives them. None means: decided by `resolve`, which says why."""

    model: str
    """A folder, a .gguf file, or a Hugging Face model id."""
    tokenizer: str | None = None
    """Folder or file with tokenizer.json; None: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    generation_config: Literal["auto", "octavo"] = "auto"
    """auto: a request without sampling parameters takes those that the model's
    generation_config.json names; octavo: only our own defaults. Ends of text count either way."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    """Source of the random streams of requests without a seed of their own."""
    max_model_len: int | None = None
    """Prompt and output tokens of one request, together."""
    max_num_seqs: int | None = None
    """Requests in one step."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one request in one step; 0: only the budget limits."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool | None = None
    """Plan and launch step N+1 before the result of N is applied."""
    linear_backend: Literal["auto", "tiled", "cublas", "fixed"] = "auto"
    """auto: tiled on a CPU, fixed on a GPU. With cublas results depend on the batch."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    block_size: int = 16
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float | None = None
    """GPU: share of its memory that the engine may take in all. CPU: share of the memory left
    beside the weights and a full step that the KV cache may take."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache; overrides gpu_memory_utilization."""
    num_gpu_blocks_override: int | None = None
    """Blocks of the pool, the null block included; overrides the memory profile (tests)."""
    max_logprobs: int = 20
    """Largest logprobs / prompt_logprobs a request may ask; -1: up to the vocabulary."""
    chat_template: str | None = None
    """Jinja source or a path to it; None: the model's own."""
    skip_tokenizer_init: bool = False
    """Work on token ids only."""

    def __post_init__(self) -> None:
        """Raises ConfigError naming a setting that is of the wrong kind or can be right nowhere."""
        for name, hint in get_type_hints(EngineArgs).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            low, high = _RANGES.get(name, (1, MAX_COUNT))
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if isinstance(kinds[0], str):  # of a Literal
                right, rule = value in kinds, f"one of {', '.join(kinds)}"
            elif bool in kinds:
                right, rule = isinstance(value, bool), "true or false"
            elif str in kinds:
                right, rule = isinstance(value, str), "text"
            elif float in kinds:
                right, rule = is_number and 0 < value <= 1, "in (0, 1]"
            else:
                right = is_number and isinstance(value, int) and low <= value <= high
                rule = f"an integer from {low} to {high}"
            if not right and not (value is None and type(None) in kinds):
                raise ConfigError(f"{name}={shown(value)} must be {rule}")


MAX_COUNT = 2**31 - 1
# Of integer settings: others are from 1 to MAX_COUNT.
_RANGES = {
    "seed": (-(2**63), 2**64 - 1),
    "long_prefill_token_threshold": (0, MAX_COUNT),
    "block_size": (1, 4096),  # larger blocks waste memory and no request can share them
    "kv_cache_memory_bytes": (1, 2**63 - 1),
    "num_gpu_blocks_override": (2, MAX_COUNT),
    "max_logprobs": (-1, MAX_COUNT),
}


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV block pool, except its size, which the worker's memory profile decides."""

    block_size: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    num_blocks_override: int | None
    group_windows: tuple[int | None, ...] = (None,)
    """The window of each KV group; see ModelConfig.layer_groups."""

    def layout(self, max_num_batched_tokens: int) -> KVCacheLayout:
        """What requests hold: a step in flight and the next one may run that many tokens each."""
        return KVCacheLayout(self.block_size, self.group_windows, 2 * max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True
    max_bypass: int = 32
    """Younger requests admitted past one that does not fit, before it blocks the queue."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs to know, resolved."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: Literal["cpu", "cuda"]
    seed: int
    max_logprobs: int
    linear_backend: LinearBackend
    enforce_eager: bool
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """One resolved setting, for `octavo explain`."""

    name: str
    value: str
    reason: str
