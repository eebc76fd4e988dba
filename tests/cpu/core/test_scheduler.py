"""The scheduler's promises on planning, intake, order and reporting, one by one."""

from __future__ import annotations

import pickle

import pytest

from octavo.core.request import RequestStatus
from octavo.errors import InvalidRequestError
from octavo.outputs import FinishReason
from tests.cpu.core.fakes import EOS, fake_token, make_request, make_scheduler
from tests.cpu.core.loop import BOTH, live, looped, run_all, scheduled

# One rule, no phases


def test_prefill_chunks_and_decodes_share_a_step() -> None:
    loop = looped(make_request("a", 6, 8), budget=10)
    loop.step()
    loop.add(make_request("b", 20, 4))
    plans = [scheduled(loop.launch())]
    loop.settle()
    plans.append(scheduled(loop.launch()))
    loop.settle()
    plans.append(scheduled(loop.launch()))
    assert plans == [{"a": 1, "b": 9}, {"a": 1, "b": 9}, {"a": 1, "b": 2}]
    loop.settle()
    loop.drain()
    loop.check_outputs()


@BOTH
def test_request_samples_only_when_its_last_known_token_is_run(depth: int) -> None:
    loop = looped(make_request("a", 20, 3), budget=8, depth=depth)
    loop.drain()
    sampled = ["a" in plan.sampling_requests for plan in loop.plans if scheduled(plan)]
    assert sampled == [False, False, True, True, True]
    loop.check_outputs()


def test_long_prefill_leaves_a_token_for_each_running_request_behind_it() -> None:
    """A long prompt that comes first by priority must not starve decodes."""
    loop = looped(budget=8, policy="priority")
    for name in "bc":
        loop.add(make_request(name, 3, 20, priority=1))
    loop.step()
    loop.add(make_request("long", 100, 2, priority=0))
    loop.step()
    for _ in range(5):
        assert scheduled(loop.launch()) == {"long": 6, "b": 1, "c": 1}
        loop.settle()
    loop.drain()
    loop.check_outputs()


def test_budget_smaller_than_the_running_requests_still_serves_the_oldest() -> None:
    loop = looped(*(make_request(f"r{i}", 2, 6) for i in range(6)), budget=3)
    loop.drain()
    loop.check_outputs()
    ends = [name for plan in loop.plans for name in plan.removed_request_ids]
    assert ends == sorted(ends)


def test_long_prefill_token_threshold_caps_a_request_per_step() -> None:
    loop = looped(
        make_request("a", 30, 2),
        make_request("b", 5, 2),
        budget=32,
        long_prefill_token_threshold=7,
    )
    assert scheduled(loop.launch()) == {"a": 7, "b": 5}
    loop.settle()
    loop.drain()
    loop.check_outputs()


def test_max_num_seqs_caps_running_requests() -> None:
    loop = looped(*(make_request(f"r{i}", 3, 5) for i in range(7)), max_num_seqs=3)
    loop.drain()
    assert max(len(plan.num_scheduled_tokens) for plan in loop.plans) == 3
    loop.check_outputs()


@BOTH
@pytest.mark.parametrize("chunk", [3, 7, 37, 64])
def test_tokens_do_not_depend_on_chunks_or_overlap(depth: int, chunk: int) -> None:
    requests = [make_request(f"r{i}", 5 + 9 * i, 6, eos=True) for i in range(4)]
    run_all(make_scheduler(budget=chunk), requests, depth)


def test_nothing_is_scheduled_past_max_tokens_with_steps_in_flight() -> None:
    """No speculative extra step: the bound known + in flight is enough to stop."""
    loop = looped(make_request("a", 4, 2), depth=3)
    loop.launch()
    loop.launch()
    assert loop.launch().empty
    assert sum(plan.total_num_scheduled_tokens for plan in loop.plans) == 5


@BOTH
def test_context_limit_ends_a_request(depth: int) -> None:
    loop = run_all(make_scheduler(max_model_len=12), [make_request("a", 9, 50)], depth)
    assert len(loop.received["a"].token_ids) == 3
    assert loop.received["a"].last.finish_reason == FinishReason.LENGTH  # type: ignore[union-attr]


@BOTH
def test_scores_only_request_runs_its_prompt_samples_nothing_and_ends(depth: int) -> None:
    """L04: max_tokens 0, also when the prompt fills the context."""
    requests = [
        make_request("a", 30, 0, prompt_logprobs=0),
        make_request("b", 64, 0, prompt_logprobs=0),
        make_request("plain", 5, 0),
    ]
    loop = run_all(make_scheduler(budget=16, max_model_len=64), requests, depth)
    assert all(not plan.sampling_requests for plan in loop.plans)


def test_plan_is_plain_data() -> None:
    loop = looped(make_request("a", 6, 3))
    plan = loop.launch()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_empty_plan_has_no_step_id_and_ids_have_no_gaps() -> None:
    loop = looped(make_request("a", 4, 2))
    loop.drain()
    assert loop.scheduler.schedule().step_id == 0
    loop.add(make_request("b", 4, 2))
    loop.drain()
    assert [plan.step_id for plan in loop.plans] == list(range(1, len(loop.plans) + 1))


def test_plan_that_only_removes_is_a_step() -> None:
    loop = looped(make_request("a", 4, 9))
    loop.step()
    loop.abort("a")
    assert not loop.scheduler.has_unfinished()
    assert loop.scheduler.has_work()
    plan = loop.launch()
    assert (scheduled(plan), plan.removed_request_ids, plan.step_id) == ({}, ["a"], 2)
    loop.settle()
    assert not loop.scheduler.has_work()


# Intake


def test_refused_and_duplicate_requests_disturb_nobody() -> None:
    loop = looped(make_request("a", 6, 4), num_usable_blocks=8)
    for bad, field in [
        (make_request("b", 0), "prompt"),
        (make_request("b", 500), "prompt"),
        (make_request("b", 20, 20), "max_tokens"),
        (make_request("a", 6), "request_id"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            loop.scheduler.add_request(bad)
        assert caught.value.field == field
    loop.drain()
    loop.check_outputs()


def test_id_may_live_again_after_its_end_even_with_the_old_step_in_flight() -> None:
    """V16: the result of the first life does not reach the second."""
    loop = looped(make_request("a", 4, 9), depth=2)
    loop.launch()
    loop.launch()
    loop.abort("a")
    loop.add(make_request("a", 7, 3))
    loop.drain()
    loop.check_outputs()


# Order


def test_fcfs_ignores_priority_and_priority_overtakes() -> None:
    def first_run(policy: str) -> list[str]:
        loop = looped(max_num_seqs=1, policy=policy)
        for index in range(4):
            loop.add(make_request(f"r{index}", 4, 2, priority=3 - index))
        loop.drain()
        return [new.request_id for plan in loop.plans for new in plan.new_requests]

    assert first_run("fcfs") == ["r0", "r1", "r2", "r3"]
    assert first_run("priority") == ["r3", "r2", "r1", "r0"]


def test_equal_priorities_run_in_order_of_arrival() -> None:
    loop = looped(max_num_seqs=1, policy="priority")
    for index in range(3):
        loop.add(make_request(f"r{index}", 4, 1, priority=1))
    loop.drain()
    assert [n.request_id for p in loop.plans for n in p.new_requests] == ["r0", "r1", "r2"]


def test_small_request_passes_one_that_does_not_fit_but_not_for_ever() -> None:
    """Bounded bypass with ageing: after max_bypass admissions the queue waits for the big one."""
    loop = looped(make_request("old", 16, 30), num_usable_blocks=14, max_bypass=3)
    loop.step()
    loop.add(make_request("big", 50, 4))
    for index in range(6):
        loop.add(make_request(f"s{index}", 3, 1))
    loop.drain()
    loop.check_outputs()
    order = [new.request_id for plan in loop.plans for new in plan.new_requests]
    assert order[:5] == ["old", "s0", "s1", "s2", "big"]


def test_max_bypass_zero_is_strict_order() -> None:
    loop = looped(make_request("old", 16, 20), num_usable_blocks=14, max_bypass=0)
    loop.step()
    loop.add(make_request("big", 50, 4))
    loop.add(make_request("small", 3, 1))
    loop.drain()
    order = [new.request_id for plan in loop.plans for new in plan.new_requests]
    assert order == ["old", "big", "small"]


def test_request_waiting_for_its_grammar_is_skipped_without_blame() -> None:
    loop = looped(make_request("g", 4, 2), make_request("a", 4, 2), max_bypass=0)
    live(loop.scheduler, "g").status = RequestStatus.WAITING_FOR_GRAMMAR
    assert list(scheduled(loop.launch())) == ["a"]
    loop.settle()
    assert live(loop.scheduler, "g").num_bypassed == 0
    live(loop.scheduler, "g").status = RequestStatus.WAITING
    loop.drain()
    loop.check_outputs()


def test_admission_reserves_the_whole_prompt_but_takes_the_chunk_only() -> None:
    """Two prompts that do not fit together are not started together, chunked or not."""
    loop = looped(
        make_request("a", 36, 2), make_request("b", 36, 2), num_usable_blocks=16, budget=8
    )
    plan = loop.launch()
    assert scheduled(plan) == {"a": 8}
    assert loop.scheduler.stats().num_free_blocks == 14
    loop.settle()
    loop.drain()
    loop.check_outputs()
    assert loop.scheduler.stats().num_preemptions == 0


# Reporting


def test_news_carry_times_cache_hits_and_reasons() -> None:
    scheduler = make_scheduler()
    loop = run_all(scheduler, [make_request("a", list(range(20)), 2)])
    loop.add(make_request("b", list(range(20)), 3))
    [news] = loop.step()
    assert news.num_cached_tokens == 16
    assert news.first_scheduled_time is not None
    loop.drain()
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 16)


def test_eos_has_no_stop_reason() -> None:
    position = next(p for p in range(4, 60) if fake_token("a", p) == EOS)
    loop = run_all(make_scheduler(), [make_request("a", 4, position, eos=True)])
    last = loop.received["a"].last
    assert last is not None
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)


def test_stats_describe_the_step() -> None:
    loop = looped(make_request("a", 6, 4), make_request("b", 30, 4), budget=16, max_num_seqs=2)
    loop.add(make_request("c", 3, 1))
    loop.launch()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_scheduled_tokens, stats.num_prefill_tokens) == (16, 16)
    assert (stats.num_blocks, stats.num_free_blocks) == (64, 64 - 2 - 3)
    loop.settle()
    loop.launch()
    assert loop.scheduler.stats().num_prefill_tokens == 15
    loop.settle()
    loop.drain()


def test_prefix_cache_is_reset_only_when_nothing_is_held() -> None:
    prompt = list(range(20))
    loop = looped(make_request("a", prompt, 2))
    loop.step()
    assert not loop.scheduler.reset_prefix_cache()
    loop.drain()
    assert loop.scheduler.reset_prefix_cache()
    loop.add(make_request("b", prompt, 1))
    [news] = loop.step()
    assert news.num_cached_tokens == 0


def test_shared_prefix_of_1000_tokens_is_computed_once() -> None:
    prefix = [token % 50 for token in range(1000)]
    scheduler = make_scheduler(200, block_size=16, budget=256, max_model_len=1100)
    loop = run_all(scheduler, [make_request("a", [*prefix, 1, 2, 3], 1)])
    before = loop.runner.num_computed_tokens
    loop.add(make_request("b", [*prefix, 4, 5, 6, 7], 1))
    loop.drain()
    assert loop.runner.num_computed_tokens - before == 1004 - 992
    loop.check_outputs()


def test_integrity_check_sees_a_lost_block_and_a_wrong_counter() -> None:
    loop = looped(make_request("a", 6, 4))
    loop.launch()
    a = live(loop.scheduler, "a")
    a.num_inflight_tokens += 1
    with pytest.raises(AssertionError, match="in flight miscounted"):
        loop.scheduler.check_integrity()
    a.num_inflight_tokens -= 1
    blocks = loop.scheduler.state.kv.free(a)
    with pytest.raises(AssertionError, match="holders"):
        loop.scheduler.check_integrity()
    assert blocks
