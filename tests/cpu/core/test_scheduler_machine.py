"""Hypothesis drives the scheduler: any order of add, launch, settle, abort, fail and drafts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from octavo.config.kv_cache import KVCacheLayout
from tests.cpu.core.fakes import fake_token, make_request, make_scheduler
from tests.cpu.core.loop import Loop

MAX_MODEL_LEN = 28


class SchedulerMachine(RuleBasedStateMachine):
    """The Loop's oracle checks every step; the rules choose when each thing happens."""

    loop: Loop

    @initialize(
        num_spare=st.integers(0, 7),
        windows=st.sampled_from([(None,), (5,), (1,), (None, 6), (None, 9, 9), (4, 4)]),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(2, 16),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 3]),
        max_bypass=st.integers(0, 3),
        caching=st.booleans(),
        depth=st.integers(1, 2),
    )
    def start(  # type: ignore[no-untyped-def]
        self,
        num_spare,
        windows,
        max_num_seqs,
        budget,
        policy,
        threshold,
        max_bypass,
        caching,
        depth,
    ) -> None:
        scheduler = make_scheduler(
            KVCacheLayout(4, windows, 2 * budget).peak_blocks(MAX_MODEL_LEN) + num_spare,
            windows=windows,
            max_num_seqs=max_num_seqs,
            budget=budget,
            max_model_len=MAX_MODEL_LEN,
            caching=caching,
            policy=policy,
            long_prefill_token_threshold=threshold,
            max_bypass=max_bypass,
        )
        self.loop = Loop(scheduler, depth)
        self.count = 0

    @rule(
        length=st.integers(1, 16),
        own=st.integers(0, 1),
        max_tokens=st.integers(0, 11),
        scores=st.booleans(),
        stops=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, "s"]),
    )
    def add(self, length, own, max_tokens, scores, stops, priority, salt) -> None:  # type: ignore[no-untyped-def]
        self.count += 1
        prompt = [*range(length - 1), own] if length > 1 else [own]
        params: dict[str, object] = {"prompt_logprobs": 0} if scores else {}
        if stops:
            params["stop_token_ids"] = list(range(0, 50, 6))
        self.loop.add(
            make_request(
                f"r{self.count}",
                prompt,
                max_tokens,
                priority=priority,
                cache_salt=salt,
                **params,
            )
        )

    @precondition(lambda self: len(self.loop.in_flight) < self.loop.depth)
    @rule()
    def launch(self) -> None:
        self.loop.launch()

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def settle(self) -> None:
        self.loop.settle()

    @rule(num_steps=st.integers(1, 10))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.loop.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = sorted(self.loop.received)
        self.loop.abort(*data.draw(st.lists(st.sampled_from([*names, "unknown"]), max_size=2)))

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def fail(self) -> None:
        self.loop.fail()

    @precondition(lambda self: len(self.loop.scheduler.state.running) > 0)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Memory pressure out of nowhere, at any point between two steps."""
        running = list(self.loop.scheduler.state.running)
        self.loop.scheduler.state.preempt(data.draw(st.sampled_from(running)))

    @rule(num_good=st.integers(0, 3), num_drafts=st.integers(0, 4))
    def draft(self, num_good: int, num_drafts: int) -> None:
        for request in self.loop.scheduler.state.running:
            name, start = request.request_id, request.num_tokens + request.num_inflight_samples
            drafts = [fake_token(name, start + i) if i < num_good else 7 for i in range(num_drafts)]
            self.loop.scheduler.set_drafts({name: drafts})

    @rule()
    def drain(self) -> None:
        self.loop.drain(2_000)
        self.loop.check_outputs()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "loop"):
            self.loop.verify()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
