"""request_queue, preemption, stop, admission and inflight, each alone."""

from __future__ import annotations

import random

import pytest

from octavo.config.engine import SchedulerConfig
from octavo.config.kv_cache import KVCacheLayout
from octavo.core.admission import check_can_ever_run
from octavo.core.block_pool import BlockPool
from octavo.core.inflight import InflightSteps
from octavo.core.preemption import choose_victim
from octavo.core.request import Request, RequestStatus
from octavo.core.request_queue import RequestQueue
from octavo.core.stop import append_until_stop
from octavo.errors import InvalidRequestError
from tests.cpu.core.fakes import EOS, make_request


def queued(name: str, *order: int) -> Request:
    return Request(make_request(name), order=(order[0], order[1]))


def test_queue_is_in_order_whatever_the_order_of_arrival() -> None:
    requests = [queued(f"r{p}{a}", p, a) for p in range(3) for a in range(5)]
    shuffled = requests[:]
    random.Random(0).shuffle(shuffled)
    queue = RequestQueue()
    for request in shuffled:
        queue.add(request)
    assert list(queue) == requests
    assert queue.after(requests[4]) == requests[5:]
    for request in shuffled[:7]:
        queue.remove(request)
        assert request not in queue
    assert list(queue) == [r for r in requests if r not in shuffled[:7]]


def test_preempted_request_returns_to_its_old_place() -> None:
    a, b, c = (queued(name, 0, index) for index, name in enumerate("abc"))
    queue = RequestQueue()
    for request in (a, b, c):
        queue.add(request)
    queue.remove(b)
    queue.add(b)
    assert list(queue) == [a, b, c]


def test_removing_what_is_not_queued_is_caught() -> None:
    queue = RequestQueue()
    queue.add(queued("a", 0, 1))
    with pytest.raises(AssertionError):
        queue.remove(queued("b", 0, 1))


def candidate(name: str, computed: int) -> Request:
    return Request(make_request(name), num_computed_tokens=computed)


def test_victim_costs_least_per_block_gained() -> None:
    long, short = candidate("long", 160), candidate("short", 20)
    freeable = {"long": 10, "short": 2}

    def num(request: Request) -> int:
        return freeable[request.request_id]

    assert choose_victim([short, long], 1, num) is short
    assert choose_victim([short, long], 2, num) is short
    assert choose_victim([short, long], 40, num) is short
    freeable["short"] = 1
    assert choose_victim([short, long], 40, num) is long, "20 tokens a block against 16"
    assert choose_victim([short, long], 1, num) is short


def test_victim_that_frees_nothing_is_the_last_resort_and_of_equals_the_last_goes() -> None:
    shared, plain, twin = candidate("shared", 1), candidate("plain", 50), candidate("twin", 50)
    freeable = {"shared": 0, "plain": 3, "twin": 3}

    def num(request: Request) -> int:
        return freeable[request.request_id]

    assert choose_victim([shared, plain, twin], 1, num) is twin
    assert choose_victim([plain, shared], 1, num) is plain
    assert choose_victim([shared], 1, num) is shared
    assert choose_victim([], 1, num) is None


def ended(*tokens: int, **params: object) -> tuple[RequestStatus, int | None] | None:
    request = Request(make_request("r", 4, 5, eos=True, **params), output_limit=5)  # type: ignore[arg-type]
    request.output_token_ids = list(tokens[:-1])
    return append_until_stop(request, [tokens[-1]])[1]


STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH


def test_stop_conditions_and_reasons() -> None:
    assert ended(1) is None
    assert ended(EOS) == (STOPPED, None)
    assert ended(7, stop_token_ids=[7]) == (STOPPED, 7)
    assert ended(EOS, stop_token_ids=[EOS]) == (STOPPED, None), "EOS has no stop_reason"
    assert ended(1, 2, 3, 4, 5) == (LENGTH, None)
    assert ended(1, 2, 3, 4, EOS) == (STOPPED, None), "a stop at the limit is a stop"


def test_stops_are_inert_before_min_tokens_but_the_limit_is_not() -> None:
    assert ended(EOS, min_tokens=2) is None
    assert ended(7, stop_token_ids=[7], min_tokens=2) is None
    assert ended(1, EOS, min_tokens=2) == (STOPPED, None)
    assert ended(1, 2, 3, 4, EOS, min_tokens=5) == (STOPPED, None)


def test_tokens_after_a_stop_are_dropped() -> None:
    """Speculation can bring tokens past the end in one result."""
    request = Request(make_request("r", 4, 10, stop_token_ids=[7]), output_limit=10)
    assert append_until_stop(request, [1, 7, 2]) == (2, (STOPPED, 7))
    assert request.output_token_ids == [1, 7]
    assert append_until_stop(request, []) == (0, None)


def refusal(prompt: int, max_tokens: int, limit: int = 64, num_blocks: int = 100) -> str | None:
    try:
        config = SchedulerConfig(4, 16, limit)
        check_can_ever_run(
            make_request("r", prompt, max_tokens), config, KVCacheLayout(4), num_blocks
        )
    except InvalidRequestError as error:
        return error.field
    return None


def test_admission_limits() -> None:
    """P02, P03, S01: the context limit and the pool, at their borders."""
    assert refusal(0, 4) == "prompt"
    assert refusal(65, 0) == "prompt"
    assert refusal(64, 0) is None
    assert refusal(64, 1) == "prompt"
    assert refusal(63, 1) is None
    assert refusal(63, 100) is None, "the context limit ends it"
    assert refusal(10, 6, num_blocks=4) is None
    assert refusal(10, 7, num_blocks=4) == "max_tokens"
    assert refusal(16, 0, num_blocks=4) is None
    assert refusal(16, 1, num_blocks=4) == "prompt"
    assert refusal(17, 0, num_blocks=4) == "prompt"


def test_blocks_return_with_the_last_step_launched_when_they_were_freed() -> None:
    pool = BlockPool(10)
    steps = InflightSteps(pool.free)
    request = Request(make_request("r"))
    first = steps.launch([(request, 0, 5, 1)])
    second = steps.launch([(request, 0, 1, 1)])
    assert (first, second) == (1, 2)
    assert (request.num_inflight_tokens, request.num_inflight_samples) == (6, 2)
    steps.free(pool.allocate(3))
    third = steps.launch([])
    steps.settle(first)
    steps.release_settled()
    assert (pool.num_free_blocks, steps.num_deferred_blocks) == (6, 3)
    steps.settle(second)
    steps.release_settled()
    assert (pool.num_free_blocks, steps.num_deferred_blocks) == (9, 0)
    steps.settle(third)
    assert (request.num_inflight_tokens, request.num_inflight_samples) == (0, 0)
    steps.free(pool.allocate(2))
    assert pool.num_free_blocks == 9, "nothing is in flight: at once"


def test_steps_settle_in_order_only() -> None:
    steps = InflightSteps(lambda blocks: None)
    steps.launch([])
    second = steps.launch([])
    with pytest.raises(AssertionError, match="oldest"):
        steps.settle(second)
