"""What a GPU's executor has instead of a thread: calls run where they are made, errors are kept."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from octavo.executor.inline import PendingStep, _CallersThread
from octavo.worker.model_runner import LaunchedStep
from tests.cpu.worker.test_worker import make_worker


def test_a_call_runs_in_the_callers_thread() -> None:
    seen = _CallersThread().submit(threading.get_ident)
    assert seen.result() == threading.get_ident()


def test_what_a_call_raises_is_the_outcome_of_its_step(tmp_path: Path) -> None:
    def launch() -> LaunchedStep:
        raise ValueError("no such kernel")

    step = PendingStep(_CallersThread().submit(launch), make_worker(tmp_path))
    assert isinstance(step.collect(), ValueError)
    assert isinstance(step.collect(), ValueError)


def test_an_interrupt_is_not_kept() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _CallersThread().submit(interrupted)
