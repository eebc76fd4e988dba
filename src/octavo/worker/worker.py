"""One rank: loads the model, profiles memory, owns the KV cache, runs steps."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from octavo.attention.base import AttentionPlanner
from octavo.attention.groups import ModelBackend, make_backend
from octavo.attention.native import make_cpu_attention
from octavo.attention.triton_paged import TritonAttention
from octavo.config.engine import Decision, EngineConfig
from octavo.config.machine import available_memory
from octavo.config.resolve import engine_share, size_kv_pool
from octavo.core.scheduler_output import SchedulerOutput
from octavo.errors import ConfigError, DeviceLostError
from octavo.models.decoder import TORCH_DTYPES
from octavo.weights.loader import load_model
from octavo.worker.cpu_runner import CpuModelRunner
from octavo.worker.device import initialise_math, probe_device
from octavo.worker.forward_batch import build_common_metadata
from octavo.worker.gpu_runner import GpuModelRunner
from octavo.worker.model_runner import LaunchedStep, ModelRunner
from octavo.worker.request_slots import RequestSlots

GRAPH_RESERVE = 1 << 30
"""GPU bytes kept for CUDA graphs, their hidden states, and what the driver takes for them."""
SAMPLING_BYTES = 12
"""GPU bytes for each logit of a step: graph output, fp32 copy and counts of edited rows."""


class Worker:
    """Life cycle: construct (weights are loaded), `size_pool`, `initialise`, then `launch` per step.

    On a GPU all its work goes to one stream of its own, whichever thread calls.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._device = torch.device(config.device)
        self._stream: torch.cuda.Stream | None = None
        if config.device == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        else:
            initialise_math()
        self._backend = self._make_backend()
        self._model = load_model(
            config.model, self._backend, self._device, config.seed, config.linear_backend
        )
        if config.device == "cuda":
            torch.cuda.synchronize()  # weights were copied on other streams
        self._spec = config.model.kv_cache_spec(config.cache.block_size)
        self._runner: ModelRunner | None = None

    def _make_backend(self) -> ModelBackend:
        model, scheduler = self._config.model, self._config.scheduler
        heads, spec = model.num_heads, model.kv_cache_spec(self._config.cache.block_size)
        limits = scheduler.max_num_seqs, scheduler.max_model_len

        def make(window: int | None) -> AttentionPlanner:
            if self._config.device == "cpu":
                dtype = TORCH_DTYPES[model.dtype]
                return make_cpu_attention(model, dtype, spec.block_size, window)
            return TritonAttention(heads, spec, *limits, self._device, window)

        return make_backend(self._config.cache.group_windows, make)

    @torch.inference_mode()
    def size_pool(self) -> tuple[int, Decision]:
        """Blocks of the pool, the null block included: what fits beside a full-size step.

        Free memory, less the most that a forward pass of as many tokens as a step may have held at
        once (logits and its own small KV cache included). On a CPU not in it: the temporaries of
        sampling and of prompt scores, which come after the pass, when its own are free again. On a
        GPU they and the runner's own tensors come on top. A block costs its K/V and its part of the
        store of hidden states for prompt scores. Raises ConfigError if not even one block of the
        asked size fits, or the pass itself does not.
        """
        if self._config.device == "cuda":
            with self._told_what_would_fit():
                peak = _peak_gpu_bytes(self._run_dummy)
            available = engine_share(self._config, probe_device("cuda")) - peak
            available -= _runner_bytes(self._config)
        else:
            available = available_memory()
            available -= _peak_bytes(self._run_dummy)
        model, block_size = self._config.model, self._config.cache.block_size
        block_bytes = self._spec.block_bytes * len(model.layer_groups()[0])
        block_bytes += block_size * model.hidden_size * TORCH_DTYPES[model.dtype].itemsize
        return size_kv_pool(self._config, block_bytes, max(0, available))

    def initialise(self, config: EngineConfig, num_blocks: int) -> None:
        """Allocate the KV cache and the runner."""
        runner = CpuModelRunner if config.device == "cpu" else GpuModelRunner
        with self._told_what_would_fit():
            kv_caches = self._allocate(num_blocks)
            self._runner = runner(config, self._model, self._backend, kv_caches, self._device)

    @contextlib.contextmanager
    def _told_what_would_fit(self) -> Iterator[None]:
        """On the worker's stream; running out of memory is a ConfigError that names what to lower."""
        try:
            with torch.cuda.stream(self._stream):
                yield
        except torch.OutOfMemoryError as error:
            scheduler = self._config.scheduler
            raise ConfigError(
                f"the GPU's memory does not hold steps of max_num_batched_tokens="
                f"{scheduler.max_num_batched_tokens} and max_num_seqs={scheduler.max_num_seqs} beside "
                f"the weights and the KV cache; lower them or gpu_memory_utilization ({error})"
            ) from error

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Queue one step."""
        assert self._runner is not None, "initialise() comes first"
        if self._stream is None:
            return self._runner.launch(plan)
        # `with torch.cuda.stream(...)` takes 10 us, torch.cuda.current_stream() alone 4.
        callers = torch._C._cuda_getCurrentStream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)
        try:
            return self._runner.launch(plan)
        finally:
            torch.cuda._set_stream_by_id(*callers)  # type: ignore[no-untyped-call]

    def diagnose(self, error: Exception) -> Exception:
        """What a failed step means: the error itself, or DeviceLostError if the GPU runs no more.

        After an illegal access or a failed assertion in a kernel every later call fails, too.
        """
        if self._stream is None:
            return error
        try:
            torch.cuda.synchronize()
        except Exception as lost:
            return DeviceLostError(f"the GPU runs no more: {lost}; a step had failed: {error}")
        return error

    def finish(self) -> None:
        """Wait for all that was launched; pinned memory that kernels still use is not given back."""
        if self._stream is not None:
            with contextlib.suppress(Exception):  # of a lost GPU
                self._stream.synchronize()

    def _allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """The tensor of each layer; layers of different groups share one, in blocks of their own.

        Only the null block is zeroed (it is read for keys that are not there); the rest is written
        before it is read, and takes no memory until then on a CPU.
        """
        dtype = TORCH_DTYPES[self._config.model.dtype]
        shape = self._backend.kv_cache_shape(num_blocks, self._spec)
        groups = self._config.model.layer_groups()
        caches: dict[int, torch.Tensor] = {}
        for sharing in itertools.zip_longest(*groups):
            cache = torch.empty(shape, dtype=dtype, device=self._device)
            cache[0].zero_()
            caches |= {layer: cache for layer in sharing if layer is not None}
        return [caches[layer] for layer in range(len(caches))]

    def _run_dummy(self) -> None:
        """One prefill step of all the tokens that a step may have, on a KV cache of its own."""
        scheduler, block_size = self._config.scheduler, self._config.cache.block_size
        longest = min(scheduler.max_model_len, scheduler.max_num_batched_tokens)
        num_tokens = min(scheduler.max_num_batched_tokens, longest * scheduler.max_num_seqs)
        full, rest = divmod(num_tokens, longest)
        lens = [longest] * full + [rest] * (rest > 0)
        num_groups = len(self._config.cache.group_windows)
        slots = RequestSlots(len(lens), longest, block_size, self._device, num_groups)
        num_blocks = slots.block_tables.numel()
        block_ids = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=self._device)
        slots.block_tables.copy_(block_ids.view_as(slots.block_tables))
        rows = torch.arange(len(lens), device=self._device)
        common, input_ids = build_common_metadata(slots, rows, lens, longest, block_size)
        kv_caches, metadata = self._allocate(num_blocks + 1), self._backend.build_metadata(common)
        hidden = self._model.forward(input_ids, common, kv_caches, metadata)
        self._model.compute_logits(hidden[: scheduler.max_num_seqs])


def _runner_bytes(config: EngineConfig) -> int:
    """GPU memory that the runner takes beside the KV cache and a forward pass."""
    scheduler, block_size = config.scheduler, config.cache.block_size
    num_groups = len(config.cache.group_windows)
    numbers = scheduler.max_model_len + 2 * num_groups * -(-scheduler.max_model_len // block_size)
    tables = 4 * scheduler.max_num_seqs * numbers
    sampling = SAMPLING_BYTES * scheduler.max_num_seqs * config.model.vocab_size
    return tables + sampling + (0 if config.enforce_eager else GRAPH_RESERVE)


def _peak_gpu_bytes(run: Callable[[], None]) -> int:
    """Most GPU memory that `run` held at once beyond what was held before; it is free again."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak


def _peak_bytes(run: Callable[[], None]) -> int:
    """Most memory of this process that `run` held at once beyond what was held before.

    Measured on Linux; elsewhere 0.
    """
    gc.collect()  # garbage that is freed during the run would hide as much of its peak
    # Loading weights may have peaked higher: ask Linux to forget that. Where it is not allowed the
    # old peak counts, which is on the safe side.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    """A size from /proc/self/status. Not getrusage: ru_maxrss may be of the process that ran us."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return int(status.read_text("utf-8", "replace").split(f"{name}:")[1].split()[0]) * 1024
