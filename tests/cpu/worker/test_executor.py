"""What a GPU's executor has instead of a thread: calls run where they are made, errors are kept."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

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


def test_waiting_for_a_step_takes_no_lock_of_its_future(tmp_path: Path) -> None:
    """An interrupt could leave it taken, and the worker would wait for it for ever."""
    future: Future[LaunchedStep] = Future()
    step = PendingStep(future, make_worker(tmp_path))
    takers, condition = [], future._condition

    class Watched:
        def __enter__(self) -> object:
            takers.append(threading.get_ident())
            return condition.__enter__()

        def __exit__(self, *error: Any) -> None:
            condition.__exit__(*error)

        def notify_all(self) -> None:
            condition.notify_all()

    future._condition = Watched()  # type: ignore[assignment]
    worker = threading.Timer(0.2, future.set_exception, [ValueError("late")])
    worker.start()
    assert isinstance(step.collect(), ValueError)
    worker.join()
    assert takers
    assert threading.get_ident() not in takers


def test_an_interrupt_is_not_kept() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _CallersThread().submit(interrupted)
