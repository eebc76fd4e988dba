"""Rows S* and P03 of the failure cases seen in other engines, by name."""

from __future__ import annotations

import itertools

import pytest

from octavo.core.block_hash import hash_block
from octavo.core.request import RequestStatus
from octavo.errors import InvalidRequestError
from octavo.outputs import FinishReason
from tests.cpu.core.fakes import make_request, make_scheduler
from tests.cpu.core.loop import BOTH, Loop, run_all


@BOTH
def test_request_larger_than_the_pool_is_refused_and_blocks_nobody(depth: int) -> None:
    """S01: 49 blocks of 16 tokens, context limit 2048, 1002-token prompt, then a 5-token one."""
    loop = Loop(make_scheduler(49, block_size=16, budget=512, max_model_len=2048), depth)
    with pytest.raises(InvalidRequestError) as caught:
        loop.scheduler.add_request(make_request("big", 1002, 4))
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequestError) as caught:
        loop.scheduler.add_request(make_request("long", 500, 1000))
    assert caught.value.field == "max_tokens"
    loop.add(make_request("exact", 700, 84))
    loop.add(make_request("short", 5, 4))
    loop.drain()
    loop.check_outputs()


def test_pool_smaller_than_the_context_limit_is_refused_by_the_same_rule() -> None:
    """P03: limit 4096, the pool fits 1024, 2000 tokens are sent."""
    scheduler = make_scheduler(64, block_size=16, max_model_len=4096)
    with pytest.raises(InvalidRequestError):
        scheduler.add_request(make_request("a", 2000, 1))
    assert not scheduler.has_work()


@BOTH
def test_requests_that_hold_all_blocks_and_need_one_more_both_end(depth: int) -> None:
    """S04: 7 blocks, A holds 4 and B 3, each needs one more."""
    scheduler = make_scheduler(7, block_size=4)
    loop = run_all(scheduler, [make_request("a", 16, 4), make_request("b", 12, 4)], depth)
    assert loop.received["a"].last.num_preemptions == 0  # type: ignore[union-attr]
    assert scheduler.stats().num_preemptions >= 1


@BOTH
def test_request_that_ends_in_its_first_mixed_step_leaks_nothing(depth: int) -> None:
    """S07: max_tokens=1 with chunked prefill beside a running decode, 1,000 times."""
    loop = Loop(make_scheduler(32, budget=6, max_num_seqs=3), depth, check=False)
    loop.keep_plans = False
    for index in range(1000):
        if index % 20 == 0:
            loop.add(make_request(f"decode{index}", 3, 60))
        loop.add(make_request(f"one{index}", 9, 1))
        for _ in range(3):
            loop.step()
    loop.scheduler.check_integrity()
    loop.drain()  # asserts that blocks and slots are back
    loop.scheduler.check_integrity()
    loop.check_outputs()


@BOTH
def test_abort_before_the_first_schedule(depth: int) -> None:
    """S08: add, abort, step."""
    loop = Loop(make_scheduler(), depth)
    loop.add(make_request("a"))
    [news] = loop.abort("a")
    assert news.finish_reason == FinishReason.ABORT
    assert loop.step() == []
    loop.drain()
    assert loop.plans == [], "the runner never hears of it"


@BOTH
def test_abort_of_ended_unknown_and_repeated_ids_is_a_no_op(depth: int) -> None:
    """S09."""
    loop = Loop(make_scheduler(), depth)
    loop.add(make_request("done", 4, 1))
    loop.drain()
    loop.add(make_request("a", 4, 5))
    loop.step()
    assert [news.request_id for news in loop.abort("done", "unknown", "a", "a")] == ["a"]
    assert loop.abort("a") == []
    loop.drain()


@pytest.mark.parametrize("num_settled_before", [0, 1])
def test_abort_after_launch_drops_the_result_and_returns_blocks_once(
    num_settled_before: int,
) -> None:
    """S10: the last prefill chunk is launched, then the abort, then the result."""
    loop = Loop(make_scheduler(budget=4), 2)
    loop.add(make_request("a", 8, 4))
    loop.launch()
    loop.launch()
    for _ in range(num_settled_before):
        loop.settle()
    free = loop.scheduler.stats().num_free_blocks
    loop.abort("a")
    assert loop.scheduler.stats().num_free_blocks == free, "fenced by the steps in flight"
    while loop.in_flight:
        assert loop.settle() == []
    assert loop.scheduler.stats().num_free_blocks == 64
    loop.drain()


@pytest.mark.parametrize(
    "status",
    [
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_GRAMMAR,
        RequestStatus.RUNNING,
        RequestStatus.PREEMPTED,
    ],
)
@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_works_in_any_state(status: RequestStatus, in_flight: bool) -> None:
    """S08, S10 over all states; remote KV is in test_connector.py."""
    loop = Loop(make_scheduler(), 2)
    loop.add(make_request("a", 6, 6))
    loop.add(make_request("b", 6, 6))
    scheduler = loop.scheduler
    request = scheduler.state.requests["a"]
    if status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED):
        loop.launch()
        if not in_flight:
            loop.settle()
        if status == RequestStatus.PREEMPTED:
            scheduler.state.preempt(request)
    else:
        request.status = status
        if in_flight:
            loop.launch()
    loop.abort("a")
    loop.drain()
    loop.check_outputs()


@BOTH
def test_second_identical_prompt_recomputes_at_least_one_token(depth: int) -> None:
    """S14: 32 tokens in blocks of 16, sent twice."""
    loop = Loop(make_scheduler(block_size=16), depth)
    prompt = [token % 50 for token in range(32)]
    for name in "ab":
        loop.add(make_request(name, prompt, 5))
        loop.drain()
    loop.check_outputs()
    first = [new for plan in loop.plans for new in plan.new_requests]
    assert [new.num_computed_tokens for new in first] == [0, 16]


@BOTH
@pytest.mark.parametrize("aborts", [False, True])
def test_only_computed_blocks_are_hit(depth: int, aborts: bool) -> None:
    """S17: two prompts share 3 blocks in one step, the budget defers part of the first."""
    shared = [token % 50 for token in range(12)]
    loop = Loop(make_scheduler(budget=10), depth)
    loop.add(make_request("a", [*shared, 1], 3))
    loop.add(make_request("b", [*shared, 2], 3))
    loop.launch()
    if aborts:
        loop.abort("a")
    loop.settle()
    loop.drain()  # the runner reads back every prefix it is told to use
    loop.check_outputs()


@pytest.mark.parametrize("bits", [0, 8])
@BOTH
def test_weak_block_hash_lends_no_foreign_blocks(depth: int, bits: int) -> None:
    """S19: a constant and an 8-bit hash; prompts that differ in one early token."""
    scheduler = make_scheduler(40)
    mask = (1 << bits) - 1
    scheduler.state.kv._hash_function = lambda *a: bytes([hash_block(*a)[0] & mask])
    tail = [token % 50 for token in range(20)]
    requests = [make_request(f"r{i}", [i % 3, *tail], 6) for i in range(9)]
    run_all(scheduler, requests, depth)
    loop = Loop(scheduler, depth)
    for first in range(10, 13):  # one full block each, under the hash of the one before
        loop.add(make_request(f"s{first}", [first, 1, 2, 3, 4], 1))
        loop.drain()
        last = loop.received[f"s{first}"].last
        assert last is not None
        assert last.num_cached_tokens == 0, "the first block is another's"
    loop.check_outputs()


def test_salts_share_nothing_across_and_everything_within() -> None:
    """S20 at the level of requests; kinds of keys are in test_block_hash.py."""
    prompt = [token % 50 for token in range(20)]
    loop = Loop(make_scheduler())
    cached = []
    for index, salt in enumerate([None, "X", "Y", "X", None, ""]):
        loop.add(make_request(f"r{index}", prompt, 1, cache_salt=salt))
        loop.drain()
        cached.append(loop.received[f"r{index}"].last.num_cached_tokens)  # type: ignore[union-attr]
    loop.check_outputs()
    assert cached == [0, 0, 0, 16, 16, 0]


@BOTH
@pytest.mark.parametrize("extra", range(9))
def test_prefix_then_longer_then_diverging_prompt(depth: int, extra: int) -> None:
    """S22: P, P + extra, then one that leaves P inside a block."""
    base = [token % 50 for token in range(18)]
    loop = Loop(make_scheduler(), depth)
    longer = [*base, *range(extra)]
    diverging = [*base[:10], 49, *base[11:], 3]
    for index, prompt in enumerate([base, longer, diverging, longer]):
        loop.add(make_request(f"r{index}", prompt, 4))
        loop.drain()
    loop.check_outputs()


def test_scores_do_not_depend_on_the_order_of_prompts_that_share_a_prefix() -> None:
    """L03: three prompts in all 6 orders, scored and plain mixed, chunked."""
    base = [token % 50 for token in range(14)]
    prompts = {"a": base, "b": [*base, 7, 8, 9], "c": [*base[:9], 1, 2, 3, 4, 5]}
    for number, order in enumerate(itertools.permutations(prompts)):
        loop = Loop(make_scheduler(budget=5), 1 + number % 2)
        for name in order:
            loop.add(make_request(f"plain-{name}", prompts[name], 2))
            loop.add(make_request(name, prompts[name], 2, prompt_logprobs=0))
            loop.drain()
        loop.add(make_request("again", prompts["b"], 0, prompt_logprobs=0))
        loop.drain()
        loop.check_outputs()
        assert loop.received["again"].last.num_cached_tokens == 16  # type: ignore[union-attr]
