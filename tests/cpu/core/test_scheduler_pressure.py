"""The scheduler's promises under preemption, speculation and errors, one by one."""

from __future__ import annotations

import pytest

from octavo.core.request import Request, RequestStatus
from octavo.core.scheduler_output import ModelRunnerOutput
from octavo.outputs import FinishReason
from tests.cpu.core.fakes import fake_token, make_request, make_scheduler
from tests.cpu.core.loop import BOTH, Loop, live, looped, run_all, scheduled

# Preemption


def pressed(depth: int, **config: object) -> Loop:
    """Four requests whose outputs outgrow the pool."""
    requests = [make_request(f"r{i}", 8, 24, priority=3 - i) for i in range(4)]
    return looped(*requests, depth=depth, num_usable_blocks=12, **config)


@BOTH
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_requests_lose_no_token(depth: int, policy: str) -> None:
    loop = pressed(depth, policy=policy)
    loop.drain()
    loop.check_outputs()
    assert loop.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize(("policy", "safe"), [("fcfs", "r0"), ("priority", "r3")])
def test_first_in_order_is_never_preempted_and_ends_first(policy: str, safe: str) -> None:
    loop = pressed(2, policy=policy)
    loop.drain()
    last = {name: received.last for name, received in loop.received.items()}
    assert last[safe].num_preemptions == 0  # type: ignore[union-attr]
    assert sum(news.num_preemptions for news in last.values()) > 0  # type: ignore[union-attr]


@BOTH
def test_no_admission_in_a_step_that_preempted(depth: int) -> None:
    """The Loop asserts it at every launch; here it is certain that somebody could be admitted."""
    loop = looped(
        make_request("old", 15, 20),
        make_request("victim", 20, 12),
        num_usable_blocks=9,
        depth=depth,
    )
    for _ in range(40):
        if len(loop.scheduler.state.waiting) == 0:
            loop.add(make_request(f"late{len(loop.received)}", 3, 1))
        loop.step()
    loop.drain()
    loop.check_outputs()
    assert loop.scheduler.stats().num_preemptions > 0


def test_results_in_flight_at_a_preemption_are_kept_and_block_readmission() -> None:
    """Sampled tokens are valid whatever happens to the blocks; computed counts are void."""
    loop = looped(make_request("a", 8, 20), make_request("b", 8, 20), depth=2)
    loop.launch()
    loop.launch()
    scheduler = loop.scheduler
    b = live(scheduler, "b")
    scheduler.state.preempt(b)
    loop.verify()
    assert scheduler.stats().num_free_blocks < 64 - 3, "its blocks are fenced"
    for expected in (1, 2):
        plan = loop.launch()
        assert "b" not in scheduled(plan)
        loop.settle()
        assert (len(b.output_token_ids), b.num_computed_tokens) == (expected, 0)
    assert loop.launch().new_requests[0].token_ids == b.all_token_ids
    loop.drain()
    loop.check_outputs()


def test_preempted_request_may_end_by_what_was_in_flight() -> None:
    loop = looped(make_request("a", 8, 2), make_request("b", 8, 9), depth=2)
    loop.launch()
    loop.launch()
    loop.scheduler.state.preempt(live(loop.scheduler, "a"))
    loop.drain()
    loop.check_outputs()
    names = [name for plan in loop.plans for name in plan.removed_request_ids]
    assert names.count("a") == 1, "the runner hears of it once"


def test_victim_is_behind_and_cheap() -> None:
    """Of two candidates the one with less to recompute goes, the older one stays."""
    loop = looped(
        make_request("old", 15, 20),
        make_request("small", 5, 12),
        make_request("large", 26, 12),
        num_usable_blocks=13,
    )
    preempted: list[str] = []
    while loop.scheduler.has_work():
        loop.step()
        waiting = loop.scheduler.state.waiting
        preempted += [r.request_id for r in waiting if r.status == RequestStatus.PREEMPTED]
    assert preempted[0] == "small"
    loop.check_outputs()


@BOTH
def test_last_in_order_gives_up_its_own_blocks(depth: int) -> None:
    """Nobody is behind it and the older one keeps what it has."""
    loop = looped(
        make_request("old", 13, 6),
        make_request("young", 12, 6),
        num_usable_blocks=7,
        depth=depth,
    )
    young = live(loop.scheduler, "young")
    for _ in range(3):
        loop.step()
    assert young.num_preemptions == 1
    assert live(loop.scheduler, "old").num_preemptions == 0
    loop.drain()
    loop.check_outputs()


@BOTH
def test_prompt_scores_are_delivered_once_across_preemptions(depth: int) -> None:
    requests = [make_request(f"r{i}", 13, 14, prompt_logprobs=0) for i in range(4)]
    loop = run_all(make_scheduler(14, budget=6), requests, depth)
    assert loop.scheduler.stats().num_preemptions > 0


# Speculation


@BOTH
@pytest.mark.parametrize("num_good", [0, 1, 2, 3])
def test_speculation_changes_no_token(depth: int, num_good: int) -> None:
    """X03: drafts accepted in part, also where they reach past max_tokens."""
    loop = looped(
        make_request("a", 6, 11), make_request("b", 3, 7, eos=True), depth=depth, max_model_len=20
    )
    while loop.scheduler.has_work():
        for request in loop.scheduler.state.running:
            start = request.num_tokens + request.num_inflight_samples
            name = request.request_id
            drafts = [fake_token(name, start + i) if i < num_good else 7 for i in range(3)]
            loop.scheduler.set_drafts({name: drafts, "unknown": [1]})
        loop.step()
    loop.check_outputs()
    verified = sum(len(drafts) for plan in loop.plans for drafts in plan.spec_token_ids.values())
    assert verified > 0


def test_drafts_are_cut_to_max_tokens_and_to_the_budget() -> None:
    loop = looped(make_request("a", 4, 3), make_request("b", 4, 30), budget=8)
    loop.step()
    loop.scheduler.set_drafts({"a": [1] * 6, "b": [1] * 30})
    plan = loop.launch()
    assert {name: len(drafts) for name, drafts in plan.spec_token_ids.items()} == {"a": 1, "b": 5}
    assert scheduled(plan) == {"a": 2, "b": 6}
    loop.settle()
    loop.drain()
    loop.check_outputs()


def test_rejected_drafts_roll_the_counters_back() -> None:
    loop = looped(make_request("a", 8, 20))
    loop.step()
    loop.scheduler.set_drafts({"a": [fake_token("a", 9), 7, 7]})
    loop.launch()
    a = live(loop.scheduler, "a")
    assert (a.num_planned_tokens, a.num_inflight_samples) == (12, 4)
    assert a.spec_token_ids == []
    [news] = loop.settle()
    assert len(news.new_token_ids) == 2
    assert (a.num_computed_tokens, a.num_tokens, a.num_inflight_tokens) == (10, 11, 0)
    loop.drain()
    loop.check_outputs()


def test_tokens_after_a_stop_inside_one_result_are_dropped_with_their_logprobs() -> None:
    stop = fake_token("a", 9)
    loop = looped(make_request("a", 8, 20, stop_token_ids=[stop], logprobs=1))
    loop.step()
    loop.scheduler.set_drafts({"a": [fake_token("a", 9), fake_token("a", 10)]})
    loop.launch()
    [news] = loop.settle()
    assert (news.new_token_ids, news.stop_reason) == ([stop], stop)
    assert news.logprobs is not None
    assert len(news.logprobs) == 1
    loop.drain()


# Errors


@BOTH
def test_error_of_one_request_ends_it_alone(depth: int) -> None:
    loop = looped(*(make_request(name, 6, 6) for name in "abc"), depth=depth)
    loop.launch()
    loop.in_flight[0][1].errors["b"] = "all logits are masked"
    loop.settle()
    last = loop.received["b"].last
    assert last is not None
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "all logits are masked")
    loop.drain()
    loop.check_outputs()


@BOTH
def test_failed_step_ends_its_requests_and_spares_the_others(depth: int) -> None:
    loop = looped(*(make_request(name, 6, 6) for name in "abc"), depth=depth, max_num_seqs=2)
    loop.launch()
    assert {news.request_id for news in loop.fail()} == {"a", "b"}
    loop.drain()
    loop.check_outputs()
    assert loop.received["c"].last.finish_reason == FinishReason.LENGTH  # type: ignore[union-attr]


@pytest.mark.parametrize("result", [[], [1, 2]])
def test_impossible_result_is_an_error_of_that_request(result: list[int]) -> None:
    """A runner that samples too few or too many tokens must not corrupt the counters."""
    loop = looped(make_request("a", 6, 6), make_request("b", 6, 6))
    plan = loop.launch()
    _, output = loop.in_flight.popleft()
    loop.runner.settled(plan.step_id)
    broken = ModelRunnerOutput(plan.step_id, {**output.sampled_token_ids, "a": result})
    loop.deliver(loop.scheduler.update(plan, broken))
    assert loop.received["a"].last.finish_reason == FinishReason.ERROR  # type: ignore[union-attr]
    loop.drain()
    loop.check_outputs()


@BOTH
@pytest.mark.parametrize("bad", list("abc"))
def test_result_that_cannot_be_applied_ends_its_request_alone(
    depth: int, bad: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception while one request is settled: the rows behind it are settled all the same."""
    loop = looped(*(make_request(name, 6, 6) for name in "abc"), depth=depth)
    kv = loop.scheduler.state.kv
    cache_blocks = kv.cache_blocks

    def flaky(request: Request, num_computed_tokens: int) -> None:
        if request.request_id == bad:
            raise RuntimeError("no such block")
        cache_blocks(request, num_computed_tokens)

    monkeypatch.setattr(kv, "cache_blocks", flaky)
    loop.drain()
    loop.check_outputs()
    for name, received in loop.received.items():
        assert received.last is not None
        reason = FinishReason.ERROR if name == bad else FinishReason.LENGTH
        assert received.last.finish_reason == reason
    assert "RuntimeError: no such block" in str(loop.received[bad].last)
    assert f"{bad} ends" in caplog.text
