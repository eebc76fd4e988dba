"""Executor for one rank in this process: a worker thread launches steps in order.

The thread is what makes overlap possible on a CPU: the core plans step N+1 while it computes step N.
On a GPU launching only queues work; whoever asks for a result waits for it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from octavo.config.engine import Decision, EngineConfig
from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.worker.model_runner import LaunchedStep
from octavo.worker.worker import Worker


class PendingStep:
    """A step that is queued: its outcome, once it is asked for."""

    def __init__(self, launched: Future[LaunchedStep]) -> None:
        self._launched = launched

    def collect(self) -> ModelRunnerOutput | Exception:
        """Wait for the step: its output, or what it raised. May be called again after an interrupt."""
        error = self._launched.exception()
        if error is not None:
            return error if isinstance(error, Exception) else RuntimeError(repr(error))
        try:
            return self._launched.result().collect()
        except Exception as failure:
            return failure


class InlineExecutor:
    """Loads the model at construction; all device work is queued by one thread of its own.

    An error of construction is raised as it is and leaves no thread behind.
    """

    def __init__(self, config: EngineConfig) -> None:
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
        return PendingStep(self._thread.submit(self._worker.launch, plan))

    def shutdown(self) -> None:
        """Finish queued steps and end the thread."""
        self._thread.shutdown(wait=True)
