"""Executor for one rank in this process: it launches steps in order, and whoever asks for a result waits.

A worker thread is what makes overlap possible on a CPU: the core plans step N+1 while it computes step
N. On a GPU launching returns at once by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from octavo.config.engine import Decision, EngineConfig
from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.worker.model_runner import LaunchedStep
from octavo.worker.worker import Worker

Result = TypeVar("Result")
_LOOK_UP = 0.05  # seconds


class _Outcome(Generic[Result]):
    """What a call brought: as much of a Future as is used here, without its locks."""

    def __init__(self, fn: Callable[..., Result], args: tuple[Any, ...]) -> None:
        self._error: Exception | None = None
        try:
            self._result = fn(*args)
        except Exception as error:
            self._error = error

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._result


class PendingStep:
    """A step that is queued: its outcome, once it is asked for."""

    def __init__(
        self, launched: Future[LaunchedStep] | _Outcome[LaunchedStep], worker: Worker
    ) -> None:
        self._worker = worker
        self._launched: LaunchedStep | BaseException | None = None
        self._bell: SimpleQueue[None] = SimpleQueue()
        if isinstance(launched, Future):
            launched.add_done_callback(self._note)
        else:
            self._note(launched)

    def _note(self, launched: Future[LaunchedStep] | _Outcome[LaunchedStep]) -> None:
        self._launched = launched.exception() or launched.result()
        self._bell.put(None)

    def collect(self) -> ModelRunnerOutput | Exception:
        """Wait for the step: its output, or what it raised. May be called again after an interrupt.

        A DeviceLostError means that no later step can succeed.
        """
        while (step := self._launched) is None:
            # Not by a lock that Python code takes, a Future's neither: what a signal handler raises in
            # between would leave it taken. A signal that came just before this wait is seen after it.
            with suppress(Empty):
                self._bell.get(timeout=_LOOK_UP)
        if isinstance(step, BaseException):
            error = step if isinstance(step, Exception) else RuntimeError(repr(step))
            return self._worker.diagnose(error)
        try:
            # What a signal handler raises during the waits is not the step's error, and passes.
            step.wait()
        except torch.AcceleratorError as lost:
            return self._worker.diagnose(lost)
        try:
            return step.collect()
        except Exception as error:
            return self._worker.diagnose(error)


class InlineExecutor:
    """Loads the model at construction. An error of construction is raised as it is.

    On a CPU all device work happens on one thread of its own, on a GPU in the caller's: launching
    only queues, and passing it to a thread would cost more than most of it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._thread: ThreadPoolExecutor | _CallersThread = _CallersThread()
        if config.device == "cpu":
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-worker")
        try:
            self._worker = self._thread.submit(Worker, config).result()
        except BaseException:
            # Not waited for: after an interrupt it may still be loading, and ends when it has.
            self._thread.shutdown(wait=False)
            raise

    def size_pool(self) -> tuple[int, Decision]:
        """Blocks that fit, the null block included, and why."""
        return self._thread.submit(self._worker.size_pool).result()

    def initialise(self, config: EngineConfig, num_blocks: int) -> None:
        """Allocate the KV cache; steps may be executed from here on."""
        self._thread.submit(self._worker.initialise, config, num_blocks).result()

    def execute(self, plan: SchedulerOutput) -> PendingStep:
        """Queue one step; results come in the order of the plans."""
        return PendingStep(self._thread.submit(self._worker.launch, plan), self._worker)

    def shutdown(self) -> None:
        """Finish queued steps and end the thread."""
        self._thread.shutdown(wait=True)
        self._worker.finish()


class _CallersThread:
    """An executor without a thread: `submit` runs the call, and keeps what it raised."""

    def submit(self, fn: Callable[..., Result], /, *args: Any) -> _Outcome[Result]:
        return _Outcome(fn, args)

    def shutdown(self, wait: bool = True) -> None:
        """Nothing runs that would have to end."""
