"""The worker's view of memory: what a step needs while it runs is not given to the pool."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from octavo.config.engine import Decision, EngineArgs, EngineConfig
from octavo.config.resolve import resolve
from octavo.weights.checkpoint import load_model_config
from octavo.worker import worker as module
from octavo.worker.device import probe_device
from octavo.worker.worker import Worker
from tests.cpu.paged import settings

FREE = 1 << 40


def make_worker(folder: Path, **args: object) -> Worker:
    (folder / "config.json").write_text(json.dumps(settings()))
    engine_args = EngineArgs(str(folder), load_format="dummy", **args)  # type: ignore[arg-type]
    return Worker(resolve(engine_args, load_model_config(engine_args), probe_device()))


def sized(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """What `size_kv_pool` is told: bytes of a block, and bytes that are there."""
    seen = []

    def size(config: EngineConfig, block_bytes: int, available: int) -> tuple[int, Decision]:
        seen.append((block_bytes, available))
        return 2, Decision("kv_pool", "2", "test")

    monkeypatch.setattr(module, "size_kv_pool", size)
    monkeypatch.setattr(module, "available_memory", lambda: FREE)
    worker.size_pool()
    return seen[0]


def available_with(size: int, folder: Path) -> int:
    """What is left for the pool if a forward pass takes `size` bytes and gives them back."""
    worker = make_worker(folder)
    forward = worker._model.forward

    def hungry(*args: object) -> torch.Tensor:
        torch.ones(size, dtype=torch.uint8)
        return forward(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker._model, "forward", hungry)
        return sized(worker, patch)[1]


def test_peak_inside_the_step_is_not_given_to_the_pool(tmp_path: Path) -> None:
    """In processes of their own: memory that earlier tests left to the allocator would hide it."""
    size = 256 << 20
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        calm = processes.submit(available_with, 1, tmp_path).result(timeout=300)
        available = processes.submit(available_with, size, tmp_path).result(timeout=300)
    assert available <= FREE - size * 0.99
    assert calm - available == pytest.approx(size, rel=0.2)


def test_a_block_costs_its_hidden_states_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 tokens, 2 layers, 2 heads of 16, K and V; and 64 numbers a token for prompt scores."""
    block_bytes, _ = sized(make_worker(tmp_path), monkeypatch)
    assert block_bytes == 16 * 4 * (2 * 2 * 2 * 16 + 64)


@pytest.mark.parametrize(
    ("limits", "lens"),
    [
        ((256, 128, 4), [128, 128]),
        ((300, 128, 4), [128, 128, 44]),
        ((300, 128, 2), [128, 128]),
        ((64, 128, 4), [64]),
    ],
)
def test_dummy_step_has_all_tokens_a_step_may_have(
    limits: tuple[int, int, int], lens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, context, num_seqs = limits
    worker = make_worker(
        tmp_path, max_num_batched_tokens=budget, max_model_len=context, max_num_seqs=num_seqs
    )
    build, seen = worker._backend.build_metadata, []

    def spy(common: object) -> object:
        seen.append(common)
        return build(common)  # type: ignore[arg-type]

    monkeypatch.setattr(worker._backend, "build_metadata", spy)
    sized(worker, monkeypatch)
    assert seen[0].query_start_loc.diff().tolist() == lens  # type: ignore[attr-defined]
    assert len(seen[0].slot_mapping.unique()) == sum(lens)  # type: ignore[attr-defined]
