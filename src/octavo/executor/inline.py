"""Executor for one rank in this process: a worker thread runs steps in order.

The thread is what makes overlap possible on a CPU: the core plans step N+1 while it computes step N.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from octavo.config.engine import Decision, EngineConfig
from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.worker.worker import Worker


class InlineExecutor:
    """Loads the model at construction; all device work happens on one thread of its own.

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

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Queue one step; results come in the order of the plans."""
        return self._thread.submit(self._run, plan)

    def shutdown(self) -> None:
        """Finish queued steps and end the thread."""
        self._thread.shutdown(wait=True)

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker.launch(plan).collect()
