"""What planning and settling share: live requests, queues, blocks, steps in flight.

Owns the transitions of a request that touch more than one of them: start, preempt, park, end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.config.engine import CacheConfig, SchedulerConfig
from octavo.core.block_pool import KVBlock
from octavo.core.inflight import InflightSteps
from octavo.core.interfaces import KVConnectorScheduler
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request, RequestStatus
from octavo.core.request_queue import RequestQueue


@dataclass(slots=True)
class Totals:
    """Counts since the start, for SchedulerStats."""

    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class SchedulerState:
    """A live request is in exactly one queue; only running ones have a slot in the runner."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        num_blocks: int,
        connector: KVConnectorScheduler,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.connector = connector
        layout = cache_config.layout(config.max_num_batched_tokens)
        self.kv = KVCacheManager(num_blocks, layout, cache_config.enable_prefix_caching)
        self.inflight = InflightSteps(self.kv.release)
        self.requests: dict[str, Request] = {}
        self.running = RequestQueue()
        self.waiting = RequestQueue()
        self.kept_for_connector: dict[str, list[KVBlock]] = {}
        """Blocks of ended requests that the connector still sends."""
        self.removed_request_ids: list[str] = []
        """Left the runner's slots since the last plan."""
        self.totals = Totals()
        self._clock = clock

    def add(self, request: Request) -> None:
        """A new request starts to wait."""
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def start(self, request: Request, num_computed_tokens: int) -> None:
        """It enters the runner. The caller takes it out of the waiting queue."""
        request.num_computed_tokens = num_computed_tokens
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
        self.running.add(request)

    def preempt(self, request: Request) -> None:
        """Take its blocks back; what its launched steps sample still arrives and is kept."""
        self.running.remove(request)
        self.removed_request_ids.append(request.request_id)
        self.inflight.free(self.kv.free(request))
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.epoch += 1
        request.num_preemptions += 1
        self.totals.preemptions += 1
        self.waiting.add(request)

    def end(self, request: Request, status: RequestStatus) -> None:
        """It leaves for good, from whatever queue it is in."""
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
            self.removed_request_ids.append(request.request_id)
        else:
            self.waiting.remove(request)
        request.status = status
        del self.requests[request.request_id]
        keep = self.connector.request_finished(request, self.kv.get_block_ids(request))
        blocks = self.kv.free(request)
        if keep:
            self.kept_for_connector.setdefault(request.request_id, []).extend(blocks)
        else:
            self.inflight.free(blocks)

    def is_idle_clean(self) -> bool:
        """O(1): nothing lives or flies, and every block is back."""
        is_idle = not (self.requests or self.inflight or self.kept_for_connector)
        return is_idle and self.kv.num_free_blocks == self.kv.pool.num_usable_blocks

    def check_integrity(self) -> None:
        """Walk everything; AssertionError with the broken rule."""
        kept = [block for blocks in self.kept_for_connector.values() for block in blocks]
        deferred = list(self.inflight.deferred_blocks())
        assert len(deferred) == self.inflight.num_deferred_blocks, "deferred blocks miscounted"
        assert self.inflight or not deferred, "blocks wait for steps, but none is in flight"
        self.kv.check_integrity([*kept, *deferred])
        queued = [*self.running, *self.waiting]
        assert len(queued) == len(self.requests), "a request is in no queue or in two"
        assert len(self.running) <= self.config.max_num_seqs, "too many running requests"
        for queue in (self.running, self.waiting):
            orders = [request.order for request in queue]
            assert orders == sorted(orders), "a queue is out of order"
        assert set(self.kv.holders) <= self.requests.keys(), "an ended request holds blocks"
        for request in queued:
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        name = request.request_id
        assert self.requests.get(name) is request, f"{name}: queued but not alive"
        assert not request.status.finished, f"{name}: ended but queued"
        is_running = request.status == RequestStatus.RUNNING
        assert is_running == (request in self.running), f"{name}: wrong queue ({request.status!r})"
        flying = [launched[2:] for launched in self.inflight if launched[0] is request]
        num_tokens = sum(num_tokens for num_tokens, _ in flying)
        num_samples = sum(num_samples for _, num_samples in flying)
        assert request.num_inflight_tokens == num_tokens, f"{name}: tokens in flight miscounted"
        assert request.num_inflight_samples == num_samples, f"{name}: samples in flight miscounted"
        assert request.num_computed_tokens <= request.num_tokens, f"{name}: computed the unknown"
        num_slots = self.kv.num_slots(request)
        if is_running:
            assert num_slots >= request.num_planned_tokens, f"{name}: planned past its blocks"
        elif request.status == RequestStatus.PREEMPTED:
            assert num_slots == request.num_computed_tokens == 0, f"{name}: preempted with blocks"
