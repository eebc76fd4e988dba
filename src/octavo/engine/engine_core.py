"""EngineCore: schedule -> execute -> update, the only loop.

With overlap, step N+1 is planned and queued before the result of N is applied: up to two steps are in
flight. The scheduler's counters are built for that, so nothing else knows about it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from octavo import env
from octavo.config.engine import EngineConfig
from octavo.config.resolve import finalise
from octavo.core.request import EngineRequest
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_output import EngineCoreOutput, SchedulerOutput, SchedulerStats
from octavo.errors import DeviceLostError, EngineDeadError
from octavo.executor.inline import InlineExecutor, PendingStep

logger = logging.getLogger(__name__)

STEP_LOG_LENGTH = 4096  # steps that can be looked back on


class EngineCore:
    """Scheduler and executor of one engine. Not thread-safe: one caller drives `step`."""

    death: str | None = None
    """Why the engine serves no more."""

    def __init__(self, config: EngineConfig, record: Callable[[SchedulerStats], None]) -> None:
        """`record` is told of each plan."""
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
        self.stats = self.scheduler.stats
        self.has_work = self.scheduler.has_work
        self._depth = 2 if self.config.scheduler.async_scheduling else 1
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self.step_log: deque[SchedulerStats] = deque(maxlen=STEP_LOG_LENGTH)
        """State after each plan, newest last."""
        self._check_integrity = env.check_integrity()
        self._record = record

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it can never fit, EngineDeadError if the
        engine was shut down or has failed."""
        self._check_alive()
        self.scheduler.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state; unknown and finished ids are ignored.

        No-op once the engine is dead: all its requests ended with it.
        """
        if self.death is None:
            self.scheduler.abort(request_ids)

    def step(
        self,
        deliver: Callable[[list[EngineCoreOutput]], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Launch what can be launched, then settle the oldest step in flight and deliver its news.

        `waiting` is entered while the result is waited for, the only part that an interrupt may cut
        short: nothing is lost, and step may be called again. What breaks planning, settling or
        delivery is raised as it is, and from then on every call raises EngineDeadError.
        """
        self._check_alive()
        while len(self._in_flight) < self._depth and self._launch():
            pass
        if not self._in_flight:
            return
        plan, pending = self._in_flight[0]
        with waiting():
            result = pending.collect()  # the step stays the oldest if this is interrupted
        try:
            if isinstance(result, DeviceLostError):
                raise result
            self._in_flight.popleft()
            if isinstance(result, Exception):
                logger.error("step %d failed; its requests end", plan.step_id, exc_info=result)
                outputs = self.scheduler.fail_step(plan, f"{type(result).__name__}: {result}")
            else:
                outputs = self.scheduler.update(plan, result)
            if self._check_integrity:
                self.scheduler.check_integrity()
            deliver(outputs)  # nobody would get this news a second time
        except BaseException as error:
            self._end_by(error)
            raise

    def shutdown(self) -> None:
        """Stop the worker; launched steps finish first. May be called twice."""
        self.death = self.death or "the engine was shut down"
        self._executor.shutdown()

    def _launch(self) -> bool:
        """Plan a step and queue it; False if there is nothing to run."""
        try:
            plan = self.scheduler.schedule()
            if plan.empty:
                return False
            self._in_flight.append((plan, self._executor.execute(plan)))
            self.step_log.append(self.scheduler.stats())
            self._record(self.step_log[-1])
        except BaseException as error:
            self._end_by(error)
            raise
        return True

    def _end_by(self, error: BaseException) -> None:
        """A plan or a result may be half applied."""
        self.death = f"the engine failed: {type(error).__name__}: {error}"
        logger.error("the engine is dead", exc_info=error)

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)
