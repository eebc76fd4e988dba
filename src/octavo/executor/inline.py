"""Executor for one rank in this process: it launches steps in order, and whoever asks for a result waits.

A worker thread is what makes overlap possible on a CPU: the core plans step N+1 while it computes step
N. On a GPU launching returns at once by itself.
"""

from __future__ import annotations

import torch

from octavo.config.engine import Decision, EngineConfig
from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.executor.calls import Call, CallersThread, OwnThread
from octavo.worker.model_runner import LaunchedStep
from octavo.worker.worker import Worker


class PendingStep:
    """A step that is queued: its outcome, once it is asked for."""

    def __init__(self, launched: Call[LaunchedStep], worker: Worker) -> None:
        self._launched, self._worker = launched, worker

    def collect(self) -> ModelRunnerOutput | Exception:
        """Wait for the step: its output, or what it raised. May be called again after an interrupt.

        A DeviceLostError means that no later step can succeed.
        """
        # What a signal handler raises during the waits is not the step's error, and passes.
        self._launched.wait()
        if (raised := self._launched.error) is not None:
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
            return self._worker.diagnose(error)
        step = self._launched.result()
        try:
            step.wait()
        except torch.AcceleratorError as lost:
            return self._worker.diagnose(lost)
        try:
            return step.collect()
        except Exception as unusable:
            return self._worker.diagnose(unusable)


class InlineExecutor:
    """Loads the model at construction. An error of construction is raised as it is.

    On a CPU all device work happens on one thread of its own, on a GPU in the caller's: launching
    only queues, and passing it to a thread would cost more than most of it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._thread = OwnThread("octavo-worker") if config.device == "cpu" else CallersThread()
        try:
            self._worker = self._thread.submit(Worker, config).result()
        except BaseException:
            # Not waited for: after an interrupt it may still be loading, and ends when it has.
            self._thread.close(wait=False)
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
        self._thread.close()
        self._worker.finish()
