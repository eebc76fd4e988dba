"""One rank: loads the model, profiles memory, owns the KV cache, runs steps."""

from __future__ import annotations

import torch

from octavo.attention.reference import ReferenceAttention
from octavo.config.engine import Decision, EngineConfig
from octavo.config.machine import available_memory
from octavo.config.resolve import size_kv_pool
from octavo.core.scheduler_output import SchedulerOutput
from octavo.models.decoder import TORCH_DTYPES
from octavo.weights.loader import load_model
from octavo.worker.forward_batch import build_common_metadata
from octavo.worker.model_runner import LaunchedStep, ModelRunner
from octavo.worker.request_slots import RequestSlots


class Worker:
    """Life cycle: construct (weights are loaded), `size_pool`, `initialise`, then `launch` per step."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._device = torch.device(config.device)
        spec = config.model.kv_cache_spec(config.cache.block_size)
        self._backend = ReferenceAttention(config.model.num_heads, spec)
        self._model = load_model(config.model, self._backend, self._device, config.seed)
        self._specs = self._model.kv_cache_specs(config.cache.block_size)
        self._runner: ModelRunner | None = None

    @torch.inference_mode()
    def size_pool(self) -> tuple[int, Decision]:
        """Blocks of the pool, the null block included: what memory allows after a full-size step.

        Raises ConfigError if not even one block of the asked size fits.
        """
        budget = min(
            self._config.scheduler.max_num_batched_tokens, self._config.scheduler.max_model_len
        )
        before = available_memory()
        self._run_dummy(budget)
        block_bytes = sum(spec.block_bytes for spec in self._specs)
        return size_kv_pool(self._config, block_bytes, min(before, available_memory()))

    def initialise(self, config: EngineConfig, num_blocks: int) -> None:
        """Allocate the KV cache and the runner."""
        kv_caches = self._allocate(num_blocks)
        self._runner = ModelRunner(config, self._model, self._backend, kv_caches, self._device)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Queue one step."""
        assert self._runner is not None, "initialise() comes first"
        return self._runner.launch(plan)

    def _allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """One tensor a layer. Only the null block is zeroed (it is read for keys that are not
        there); the rest is written before it is read, and takes no memory until then on a CPU."""
        dtype = TORCH_DTYPES[self._config.model.dtype]
        caches = []
        for spec in self._specs:
            shape = self._backend.kv_cache_shape(num_blocks, spec)
            cache = torch.empty(shape, dtype=dtype, device=self._device)
            cache[0].zero_()
            caches.append(cache)
        return caches

    def _run_dummy(self, num_tokens: int) -> None:
        """One step of `num_tokens` tokens of one request on a KV cache of its own."""
        block_size = self._config.cache.block_size
        slots = RequestSlots(1, num_tokens, block_size, self._device)
        slots.block_table[0] = torch.arange(1, slots.max_blocks + 1, dtype=torch.int32)
        rows = torch.zeros(1, dtype=torch.int64, device=self._device)
        common, input_ids = build_common_metadata(
            slots, rows, [num_tokens], [num_tokens], block_size
        )
        kv_caches = self._allocate(slots.max_blocks + 1)
        hidden = self._model.forward(
            input_ids, common.positions, kv_caches, self._backend.build_metadata(common)
        )
        rows_with_logits = min(num_tokens, self._config.scheduler.max_num_seqs)
        self._model.compute_logits(hidden[:rows_with_logits])
