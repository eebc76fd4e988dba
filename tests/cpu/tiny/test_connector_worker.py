"""The worker role of a KV connector gets the scheduler role's message around each forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.interfaces import KVConnectorScheduler
from octavo.core.scheduler_output import SchedulerOutput
from octavo.kv_transfer.connector import KVConnectorWorker
from tests.cpu.tiny.helpers import PARAMS, run, runner_of, tiny


class CountingConnector(KVConnectorScheduler):
    """Scheduler role: its message is the number of tokens planned."""

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        return plan.total_num_scheduled_tokens or None


class RecordingWorker(KVConnectorWorker):
    """Worker role: notes what it was told, and how much of the cache was written by then."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache = cache
        self.events: list[tuple[str, Any, int]] = []

    def start_load_kv(self, metadata: Any) -> None:
        self.events.append(("load", metadata, self._num_written()))

    def save_kv(self, metadata: Any) -> None:
        self.events.append(("save", metadata, self._num_written()))

    def _num_written(self) -> int:
        return int((self.cache[:, 0] != 0).any(-1).any(-1).sum())


def test_message_arrives_before_and_after_each_forward(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny(tiny_model, async_scheduling=False, num_gpu_blocks_override=8) as llm:
        runner = runner_of(llm)
        cache = runner._kv_caches[0]
        cache.zero_()
        worker = RecordingWorker(cache)
        monkeypatch.setattr(runner, "_connector", worker)
        monkeypatch.setattr(llm.engine.core.scheduler.state, "connector", CountingConnector())
        run(llm, [[5, 6, 7]], PARAMS)
    assert worker.events[:4] == [("load", 3, 0), ("save", 3, 3), ("load", 1, 3), ("save", 1, 4)]
