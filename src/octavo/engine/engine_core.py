"""EngineCore: schedule -> execute -> update, the only loop.

With overlap, step N+1 is planned and queued before the result of N is applied: up to two steps are in
flight. The scheduler's counters are built for that, so nothing else knows about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from octavo import env
from octavo.config.engine import EngineConfig
from octavo.config.resolve import finalise
from octavo.core.request import EngineRequest
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_output import (
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from octavo.executor.inline import InlineExecutor
from octavo.logging import get_logger

logger = get_logger(__name__)

STEP_LOG_LENGTH = 4096  # steps that can be looked back on


class EngineCore:
    """Scheduler and executor of one engine. Not thread-safe: one caller drives `step`."""

    def __init__(self, config: EngineConfig) -> None:
        self._executor = InlineExecutor(config)
        try:
            num_blocks, pool = self._executor.size_pool()
            self.config = finalise(config, num_blocks, pool)
            self._executor.initialise(self.config, num_blocks)
        except BaseException:
            self._executor.shutdown()
            raise
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(self.config.scheduler, self.config.cache, num_blocks)
        self._depth = 2 if self.config.scheduler.async_scheduling else 1
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self.step_log: deque[SchedulerStats] = deque(maxlen=STEP_LOG_LENGTH)
        """State after each plan, newest last."""
        self._check_integrity = env.check_integrity()

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it can never fit."""
        self.scheduler.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state; unknown and finished ids are ignored."""
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """True while requests live, steps are not settled, or the runner must still free slots."""
        return self.scheduler.has_work()

    def step(self) -> list[EngineCoreOutput]:
        """Launch what can be launched, then settle the oldest step in flight."""
        while len(self._in_flight) < self._depth:
            plan = self.scheduler.schedule()
            if plan.empty:
                break
            self._in_flight.append((plan, self._executor.execute(plan)))
            self.step_log.append(self.scheduler.stats())
        if not self._in_flight:
            return []
        outputs = self._settle(*self._in_flight.popleft())
        if self._check_integrity:
            self.scheduler.check_integrity()
        return outputs

    def drain(self) -> None:
        """Settle every launched step and let the runner forget what ended."""
        while self.has_work():
            self.step()

    def stats(self) -> SchedulerStats:
        """Queue, pool and cache as of now."""
        return self.scheduler.stats()

    def shutdown(self) -> None:
        """Stop the worker; launched steps finish first. May be called twice."""
        self._executor.shutdown()

    def _settle(
        self, plan: SchedulerOutput, result: Future[ModelRunnerOutput]
    ) -> list[EngineCoreOutput]:
        try:
            output = result.result()
        except Exception as error:
            logger.exception("step %d failed; its requests end with an error", plan.step_id)
            return self.scheduler.fail_step(plan, f"{type(error).__name__}: {error}")
        return self.scheduler.update(plan, output)
