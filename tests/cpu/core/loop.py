"""schedule -> execute -> update around the fake runner, with the oracle that checks every turn."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from octavo.core.planner import num_wanted_tokens
from octavo.core.request import EngineRequest, Request, RequestStatus
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from octavo.outputs import FinishReason
from tests.cpu.core.fakes import FakeRunner, make_scheduler, solo_output

BOTH = pytest.mark.parametrize("depth", [1, 2])


@dataclass
class Received:
    """Everything the client was told about one request."""

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    scores: list[int] = field(default_factory=list)
    last: EngineCoreOutput | None = None

    def take(self, news: EngineCoreOutput) -> None:
        assert self.last is None, "news after the end"
        if news.logprobs is not None:
            assert len(news.logprobs) == len(news.new_token_ids)
        self.token_ids += news.new_token_ids
        self.scores += [score.token_ids[0] for score in news.prompt_logprobs or []]
        if news.finish_reason is not None:
            self.last = news


class Loop:
    """schedule -> execute -> update with up to `depth` steps in flight, checked at every turn."""

    def __init__(self, scheduler: Scheduler, depth: int = 1, check: bool = True) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.check = check
        config = scheduler.config
        self.runner = FakeRunner(
            scheduler.state.kv.layout, config.max_num_seqs, config.max_model_len
        )
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.received: dict[str, Received] = {}
        self.plans: list[SchedulerOutput] = []
        self.keep_plans = True

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add_request(request)
        self.received[request.request_id] = Received(request)

    def launch(self) -> SchedulerOutput:
        """Plan one step and run it; holds the liveness promise of case S02."""
        running = self.scheduler.state.running
        active = [request.request_id for request in running if num_wanted_tokens(request)]
        plan = self.scheduler.schedule()
        left_out = [name not in plan.num_scheduled_tokens for name in active]
        if any(left_out):  # for want of blocks or tokens, then nobody behind it may take them
            behind = active[left_out.index(True) :]
            assert not plan.new_requests, "admitted while a running request was left out"
            assert not set(behind) & set(plan.new_block_ids), "blocks went to one behind it"
        blocked = (RequestStatus.WAITING_FOR_GRAMMAR, RequestStatus.WAITING_FOR_REMOTE_KV)
        able = [r for r in self.scheduler.state.requests.values() if r.status not in blocked]
        if able and not self.in_flight:
            assert plan.num_scheduled_tokens, "requests wait, nothing is in flight, nothing runs"
        assert plan.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        if not plan.empty:
            self.in_flight.append((plan, self.runner.execute(plan)))
            if self.keep_plans:
                self.plans.append(plan)
        self.verify()
        return plan

    def settle(self) -> list[EngineCoreOutput]:
        """Apply the oldest result."""
        plan, output = self.in_flight.popleft()
        self.runner.settled(plan.step_id)
        return self.deliver(self.scheduler.update(plan, output))

    def fail(self) -> list[EngineCoreOutput]:
        """The oldest step raised."""
        plan, _ = self.in_flight.popleft()
        self.runner.settled(plan.step_id)
        return self.deliver(self.scheduler.fail_step(plan, "step failed"))

    def abort(self, *request_ids: str) -> list[EngineCoreOutput]:
        return self.deliver(self.scheduler.abort(request_ids))

    def deliver(self, news: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        for item in news:
            self.received[item.request_id].take(item)
        self.verify()
        return news

    def step(self) -> list[EngineCoreOutput]:
        while len(self.in_flight) < self.depth and not self.launch().empty:
            pass
        return self.settle() if self.in_flight else []

    def drain(self, max_steps: int = 10_000) -> None:
        """Run until everything has ended; all blocks and slots must be back."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "no end in sight"
        assert self.scheduler.is_idle_clean()
        assert not self.runner.slots

    def verify(self) -> None:
        if self.check:
            self.scheduler.check_integrity()

    def check_outputs(self) -> None:
        """Each request that was not cut short got its solo output, and its scores once."""
        for name, received in self.received.items():
            expected, reason = solo_output(received.request, self.scheduler.config.max_model_len)
            assert received.last is not None, f"{name} never ended"
            if received.last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert received.token_ids == expected[: len(received.token_ids)]
                continue
            assert received.token_ids == expected, name
            assert received.last.finish_reason == reason, name
            if received.request.sampling_params.prompt_logprobs is not None:
                assert received.scores == received.request.prompt_token_ids[1:], name


def run_all(scheduler: Scheduler, requests: list[EngineRequest], depth: int = 1) -> Loop:
    """Add all, drain, check."""
    loop = Loop(scheduler, depth)
    for request in requests:
        loop.add(request)
    loop.drain()
    loop.check_outputs()
    return loop


def scheduled(plan: SchedulerOutput) -> dict[str, int]:
    return plan.num_scheduled_tokens


def live(scheduler: Scheduler, name: str) -> Request:
    return scheduler.state.requests[name]


def looped(*requests, depth: int = 1, **config) -> Loop:  # type: ignore[no-untyped-def]
    loop = Loop(make_scheduler(**config), depth)
    for request in requests:
        loop.add(request)
    return loop
