"""Calls in the caller's thread and on a thread of their own, and the outcomes of steps."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from octavo.executor.calls import CallersThread, OwnThread
from octavo.executor.inline import PendingStep
from octavo.worker.model_runner import LaunchedStep
from tests.cpu.alarms import interrupt_often
from tests.cpu.worker.test_worker import make_worker

INTERRUPTED_CLOSE = """
def ring(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    thread.close()
except TimeoutError:
    pass
else:
    print("not interrupted")
"""


def test_a_call_runs_in_the_callers_thread() -> None:
    seen = CallersThread().submit(threading.get_ident)
    assert seen.result() == threading.get_ident()


@pytest.mark.parametrize("kind", [CallersThread, lambda: OwnThread("test")])
def test_what_a_call_raises_is_the_outcome_of_its_step(kind: type, tmp_path: Path) -> None:
    def launch() -> LaunchedStep:
        raise ValueError("no such kernel")

    step = PendingStep(kind().submit(launch), make_worker(tmp_path))
    assert isinstance(step.collect(), ValueError)
    assert isinstance(step.collect(), ValueError)


@pytest.mark.parametrize("kind", [CallersThread, lambda: OwnThread("test")])
def test_what_a_failed_call_had_is_freed_without_a_collection(kind: type, tmp_path: Path) -> None:
    """Memory that a step ran out of must be there for the next one."""
    held: list[weakref.ref[set[int]]] = []

    def launch() -> LaunchedStep:
        big = {1}
        held.append(weakref.ref(big))
        raise MemoryError

    worker, thread = make_worker(tmp_path), kind()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert isinstance(PendingStep(thread.submit(launch), worker).collect(), MemoryError)
        thread.submit(int).result()  # the last failed call has left the thread, too
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()


def test_an_interrupt_is_not_kept() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CallersThread().submit(interrupted)


def test_calls_run_in_order_on_one_thread_and_outlive_what_one_raises() -> None:
    thread = OwnThread("octavo-test")
    bad = thread.submit(sys.exit, "no")
    calls = [thread.submit(lambda index: (index, threading.get_ident()), i) for i in range(100)]
    outcomes = [call.result() for call in calls]
    assert [index for index, _ in outcomes] == list(range(100))
    assert len({ident for _, ident in outcomes} | {threading.get_ident()}) == 2
    with pytest.raises(SystemExit):
        bad.result()
    thread.close()
    thread.close()


def test_what_is_queued_runs_before_the_end_and_what_comes_later_is_told() -> None:
    thread, go_on = OwnThread("test"), threading.Event()
    blocked, behind = thread.submit(go_on.wait, 60), thread.submit(int)
    thread.close(wait=False)
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(int)
    go_on.set()
    assert blocked.result()
    assert behind.result() == 0
    thread.close()


def lives(name: str) -> bool:
    return name in {each.name for each in threading.enumerate()}


def ends(name: str) -> bool:
    """Within 30 seconds."""
    return any(not lives(name) or time.sleep(0.05) for _ in range(600))


def test_a_forgotten_thread_ends() -> None:
    thread = OwnThread("octavo-forgotten")
    thread.submit(int).result()
    assert lives("octavo-forgotten")
    del thread
    gc.collect()
    assert ends("octavo-forgotten")


def test_nobody_waits_for_a_forgotten_call() -> None:
    """As after an interrupted load, which may last minutes."""
    thread, go_on = OwnThread("octavo-busy"), threading.Event()
    call = thread.submit(go_on.wait, 60)
    thread.close(wait=False)
    del thread
    gc.collect()
    go_on.set()
    assert call.result()
    assert ends("octavo-busy")


def test_an_interrupted_close_is_completed_by_the_next() -> None:
    def interrupted(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        thread, go_on = OwnThread("test"), threading.Event()
        call = thread.submit(go_on.wait, 60)
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(TimeoutError):
                thread.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.1, go_on.set).start()
    thread.close()
    assert call._result is True, "close did not wait"


@pytest.mark.parametrize("before", ["", INTERRUPTED_CLOSE, "thread.close(wait=False)"])
def test_the_process_ends_with_calls_queued(before: str) -> None:
    """They run first, and what they use is still there; also after an interrupted `close`."""
    code = """
import signal, time
from octavo.executor.calls import OwnThread
thread = OwnThread("test")
thread.submit(time.sleep, 0.3)
thread.submit(print, "ran")
"""
    code += before
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (end.returncode, end.stdout, end.stderr) == (0, "ran\n", "")


def test_signal_handlers_that_raise_leave_the_thread_in_order() -> None:
    """Submitting and waiting take no lock that could stay taken: both sides would wait for ever."""
    thread = OwnThread("test")
    count = interrupt_often(
        body=lambda: thread.submit(time.sleep, 2e-5).result(),
        check=lambda: thread.submit(int).result(),
        longest=2e-4,
    )
    assert count > 100
    thread.close()
