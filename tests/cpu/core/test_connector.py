"""The KV connector's seams: found tokens, remote loads that take time, blocks kept for sending."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.interfaces import KVConnectorScheduler
from octavo.core.request import Request, RequestStatus
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.cpu.core.fakes import make_request, make_scheduler


class FakeConnector(KVConnectorScheduler):
    """Offers tokens, records what it is told."""

    def __init__(self, num_tokens: int = 0, is_async: bool = False, keeps: bool = False) -> None:
        self.offer, self.keeps = (num_tokens, is_async), keeps
        self.asked: list[tuple[str, int]] = []
        self.allocated: list[tuple[str, list[int], int]] = []
        self.finished: list[tuple[str, list[int]]] = []

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        return self.offer

    def update_state_after_alloc(
        self, request: Request, block_ids: list[int], num_external_tokens: int
    ) -> None:
        self.allocated.append((request.request_id, block_ids, num_external_tokens))

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        return f"load {len(self.allocated)}" if self.offer[1] and self.allocated else None

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        self.finished.append((request.request_id, block_ids))
        return self.keeps


def step(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    if not plan.empty:
        sampled = {name: [1] for name in plan.sampling_requests}
        scheduler.update(plan, ModelRunnerOutput(plan.step_id, sampled))
    scheduler.check_integrity()
    return plan


def test_tokens_found_elsewhere_are_not_scheduled() -> None:
    connector = FakeConnector(9)
    scheduler = make_scheduler(connector=connector)
    scheduler.add_request(make_request("a", 12, 2))
    plan = step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 3}
    assert plan.new_requests[0].num_computed_tokens == 9
    assert connector.asked == [("a", 0)]
    assert connector.allocated == [("a", plan.new_requests[0].block_ids, 9)]
    step(scheduler)
    assert [name for name, _ in connector.finished] == ["a"]


def test_last_token_is_computed_here_whatever_was_found() -> None:
    scheduler = make_scheduler(connector=FakeConnector(500))
    scheduler.add_request(make_request("a", 12, 2))
    assert step(scheduler).num_scheduled_tokens == {"a": 1}


def test_prompt_scores_need_local_hidden_states_so_nothing_is_loaded() -> None:
    connector = FakeConnector(9)
    scheduler = make_scheduler(connector=connector)
    scheduler.add_request(make_request("a", 12, 2, prompt_logprobs=0))
    assert step(scheduler).num_scheduled_tokens == {"a": 12}
    assert connector.asked == []


def test_remote_load_parks_the_request_with_its_blocks_until_it_is_done() -> None:
    scheduler = make_scheduler(connector=FakeConnector(8, is_async=True))
    scheduler.add_request(make_request("a", 12, 2))
    plan = step(scheduler)
    assert plan.num_scheduled_tokens == {}
    assert not plan.empty, "the connector's message must reach the worker"
    request = scheduler.state.requests["a"]
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KV
    assert scheduler.stats().num_free_blocks == 62
    step(scheduler)
    scheduler.kv_load_finished("a", 8)
    scheduler.kv_load_finished("unknown", 8)
    plan = step(scheduler)
    assert plan.new_requests[0].num_computed_tokens == 8
    assert plan.num_scheduled_tokens == {"a": 4}
    while scheduler.has_unfinished():
        step(scheduler)
    assert scheduler.is_idle_clean()


def test_failed_remote_load_is_recomputed() -> None:
    scheduler = make_scheduler(connector=FakeConnector(8, is_async=True))
    scheduler.add_request(make_request("a", 12, 2))
    step(scheduler)
    scheduler.kv_load_finished("a", 0)
    assert step(scheduler).num_scheduled_tokens == {"a": 12}


def test_parked_requests_leave_each_other_room_for_what_they_still_need() -> None:
    """S04: 7 blocks; two loads whose owners need one block more each are not parked together."""
    connector = FakeConnector(12, is_async=True)
    scheduler = make_scheduler(7, connector=connector)
    scheduler.add_request(make_request("a", 16, 4))
    scheduler.add_request(make_request("b", 14, 4))
    step(scheduler)
    assert [name for name, _, _ in connector.allocated] == ["a"]
    for _ in range(40):
        for request in list(scheduler.state.requests.values()):
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KV:
                scheduler.kv_load_finished(request.request_id, 12)
        step(scheduler)
    assert scheduler.is_idle_clean()


def test_parked_request_passes_a_head_that_lacks_its_blocks() -> None:
    """S04: the queue is closed for others, but the loaded request holds what the head needs."""
    connector = FakeConnector()
    scheduler = make_scheduler(8, connector=connector, max_bypass=0)
    scheduler.add_request(make_request("head", 16, 12))
    step(scheduler)
    connector.offer = (8, True)
    scheduler.add_request(make_request("loaded", 12, 4))
    step(scheduler)
    connector.offer = (0, False)
    head = scheduler.state.requests["head"]
    for _ in range(8):
        step(scheduler)
    assert head.status == RequestStatus.PREEMPTED, "its seventh block was not there"
    scheduler.kv_load_finished("loaded", 8)
    assert list(step(scheduler).num_scheduled_tokens) == ["loaded"]
    for _ in range(20):
        step(scheduler)
    assert scheduler.is_idle_clean()


@pytest.mark.parametrize("keeps", [False, True])
def test_abort_while_remote_kv_is_on_its_way(keeps: bool) -> None:
    """S08 with a connector: it may hold the blocks until nothing writes to them any more."""
    scheduler = make_scheduler(connector=FakeConnector(8, is_async=True, keeps=keeps))
    scheduler.add_request(make_request("a", 12, 2))
    step(scheduler)
    assert len(scheduler.abort(["a"])) == 1
    assert scheduler.is_idle_clean() != keeps
    scheduler.kv_load_finished("a", 8)
    scheduler.kv_send_finished("a")
    scheduler.check_integrity()
    assert scheduler.is_idle_clean()


def test_blocks_stay_until_the_connector_has_sent_them() -> None:
    scheduler = make_scheduler(connector=FakeConnector(keeps=True))
    scheduler.add_request(make_request("a", 12, 1))
    step(scheduler)
    assert not scheduler.has_unfinished()
    assert scheduler.stats().num_free_blocks == 61
    assert not scheduler.reset_prefix_cache()
    scheduler.kv_send_finished("a")
    scheduler.kv_send_finished("a")
    step(scheduler)
    assert scheduler.is_idle_clean()


def test_abort_before_schedule_is_told_to_the_connector_once() -> None:
    """S08 with the connector: the request owns no blocks yet."""
    connector = FakeConnector()
    scheduler = make_scheduler(connector=connector)
    scheduler.add_request(make_request("a"))
    scheduler.abort(["a", "a"])
    assert connector.finished == [("a", [])]
    assert scheduler.is_idle_clean()


def test_what_was_loaded_is_offered_though_no_block_is_filled_after_it() -> None:
    """Eight of ten tokens come from afar, the other two end amid a block: two blocks to hit."""
    connector = FakeConnector(8)
    scheduler = make_scheduler(connector=connector, block_size=4)
    scheduler.add_request(make_request("a", list(range(1, 11)), 1))
    step(scheduler)
    connector.offer = (0, False)
    scheduler.add_request(make_request("b", [*range(1, 11), 77, 78], 1))
    assert step(scheduler).new_requests[0].num_computed_tokens == 8
