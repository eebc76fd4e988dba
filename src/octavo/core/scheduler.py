"""The scheduler as the engine sees it: add, schedule, update, abort.

schedule() plans a step and counts it as launched; update() settles the oldest launched step. Owns
the life of every request between add_request and its last output. Single-threaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from octavo.config.engine import CacheConfig, SchedulerConfig
from octavo.core.admission import check_can_ever_run
from octavo.core.inflight import LaunchedRequest
from octavo.core.interfaces import KVConnectorScheduler
from octavo.core.planner import Planner
from octavo.core.request import EngineRequest, Request, RequestStatus
from octavo.core.scheduler_output import (
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from octavo.core.state import SchedulerState
from octavo.core.stop import append_until_stop
from octavo.errors import InvalidRequestError

logger = logging.getLogger(__name__)


class Scheduler:
    """Plans steps over all live requests and applies their results, in launch order."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        num_blocks: int,
        connector: KVConnectorScheduler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = scheduler_config
        connector = connector or KVConnectorScheduler()
        self.state = SchedulerState(scheduler_config, cache_config, num_blocks, connector, clock)
        self._planner = Planner(self.state)
        self._num_added = 0
        self._last_num_tokens = self._last_num_prefill_tokens = 0

    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request; raises InvalidRequestError if it could never finish."""
        request_id, kv = engine_request.request_id, self.state.kv
        if request_id in self.state.requests:
            raise InvalidRequestError("request_id", f"{request_id!r} is in use")
        check_can_ever_run(engine_request, self.config, kv.layout, kv.pool.num_usable_blocks)
        self._num_added += 1
        priority = engine_request.priority if self.config.policy == "priority" else 0
        num_room = self.config.max_model_len - len(engine_request.prompt_token_ids)
        limit = min(engine_request.max_tokens, num_room)
        self.state.add(Request(engine_request, (priority, self._num_added), output_limit=limit))

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests in any state; unknown, ended and repeated ids are no-ops."""
        live = (self.state.requests.get(request_id) for request_id in request_ids)
        aborted = RequestStatus.FINISHED_ABORTED
        return [self._finish(request, aborted) for request in live if request is not None]

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Unless the plan is empty it counts as launched from now on."""
        draft = self._planner.draft_step()
        plan = draft.plan
        plan.kv_connector_metadata = self.state.connector.build_connector_meta(plan)
        self._last_num_tokens = plan.total_num_scheduled_tokens
        self._last_num_prefill_tokens = draft.num_prefill_tokens
        if not plan.empty:
            plan.step_id = self.state.inflight.launch(draft.launched)
        return plan

    def update(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Apply the results of the oldest launched step; news of each request it changed.

        A request whose result cannot be applied ends with that error; the others are settled.
        """
        assert plan.step_id == output.step_id, "the result of another step"
        news = []
        for launched in self._take_step(plan):
            request = launched[0]
            try:
                item = self._settle(launched, output)
            except Exception as error:
                logger.exception("%s ends: step %d not settled", request.request_id, plan.step_id)
                message = f"{type(error).__name__}: {error}"
                item = self._finish(request, RequestStatus.FINISHED_ERROR, message)
            if item is not None:
                news.append(item)
        self.state.inflight.release_settled()
        return news

    def fail_step(self, plan: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """Settle a step that raised as a whole: the requests in it end with this error."""
        error = RequestStatus.FINISHED_ERROR
        news = [self._finish(request, error, message) for request, *_ in self._take_step(plan)]
        self.state.inflight.release_settled()
        return news

    def set_drafts(self, drafts: dict[str, list[int]]) -> None:
        """Draft tokens for the next step of running requests; others are ignored.

        They guess what follows the last token known or in flight. Verification decides, so a wrong
        or outdated guess costs time only.
        """
        for request_id, token_ids in drafts.items():
            request = self.state.requests.get(request_id)
            if request is not None and request.status == RequestStatus.RUNNING:
                request.spec_token_ids = list(token_ids)

    def kv_load_finished(self, request_id: str, num_loaded_tokens: int) -> None:
        """The connector has loaded so many tokens after the local hits; the rest is computed."""
        request = self.state.requests.get(request_id)
        if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KV:
            request.num_computed_tokens += num_loaded_tokens
            request.status = RequestStatus.WAITING

    def kv_send_finished(self, request_id: str) -> None:
        """The connector does not need the blocks of this ended request any more."""
        self.state.inflight.free(self.state.kept_for_connector.pop(request_id, []))

    def has_unfinished(self) -> bool:
        """True while any request lives."""
        return bool(self.state.requests)

    @property
    def has_inflight(self) -> bool:
        """True while a launched step is not settled."""
        return len(self.state.inflight) > 0

    def has_work(self) -> bool:
        """True while a step must be planned or settled, be it only to tell the runner who left."""
        return self.has_unfinished() or self.has_inflight or bool(self.state.removed_request_ids)

    def stats(self) -> SchedulerStats:
        """Queues, pool and totals as of now; tokens of the last planned step."""
        state, totals = self.state, self.state.totals
        return SchedulerStats(
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_blocks=state.kv.pool.num_usable_blocks,
            num_free_blocks=state.kv.num_free_blocks,
            num_scheduled_tokens=self._last_num_tokens,
            num_prefill_tokens=self._last_num_prefill_tokens,
            num_preemptions=totals.preemptions,
            prefix_cache_queries=totals.prefix_cache_queries,
            prefix_cache_hits=totals.prefix_cache_hits,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while any block is held."""
        return self.state.kv.pool.reset()

    def check_integrity(self) -> None:
        """Walk all state; AssertionError with the broken rule. For tests and debugging."""
        self.state.check_integrity()

    def is_idle_clean(self) -> bool:
        """O(1): nothing lives or flies, and every block is back."""
        return self.state.is_idle_clean()

    def _take_step(self, plan: SchedulerOutput) -> list[LaunchedRequest]:
        """Settle the counters; leaves out requests that have ended since the launch.

        Identity, not id, decides: an id may live again as another request.
        """
        settled = self.state.inflight.settle(plan.step_id)
        get = self.state.requests.get
        return [each for each in settled if get(each[0].request_id) is each[0]]

    def _settle(
        self, launched: LaunchedRequest, output: ModelRunnerOutput
    ) -> EngineCoreOutput | None:
        request, epoch, num_tokens, num_samples = launched
        request_id = request.request_id
        sampled = output.sampled_token_ids.get(request_id, [])
        error = output.errors.get(request_id)
        num_rejected = num_samples - len(sampled)
        if error is None and (num_rejected < 0 or (num_samples and not sampled)):
            error = f"the runner sampled {len(sampled)} tokens of at most {num_samples}"
        if error is not None:
            return self._finish(request, RequestStatus.FINISHED_ERROR, error)
        if scores := output.prompt_logprobs.get(request_id):
            request.num_prompt_scores += len(scores)
        num_appended, stop = append_until_stop(request, sampled)
        if epoch == request.epoch:
            request.num_computed_tokens += num_tokens - num_rejected
            self.state.kv.cache_blocks(request, request.num_computed_tokens)
        if request.output_limit == 0 and request.num_computed_tokens >= request.num_prompt_tokens:
            stop = RequestStatus.FINISHED_LENGTH, None
        token_ids = sampled if num_appended == len(sampled) else sampled[:num_appended]
        if stop is not None:
            news = self._finish(request, stop[0], None, token_ids)
            news.stop_reason = stop[1]
        elif num_appended or scores:
            news = self._news(request, token_ids)
        else:
            return None
        if (logprobs := output.logprobs.get(request_id)) is not None:
            news.logprobs = logprobs[:num_appended]
        news.prompt_logprobs = scores
        return news

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        error: str | None = None,
        token_ids: list[int] | None = None,
    ) -> EngineCoreOutput:
        self.state.end(request, status)
        news = self._news(request, token_ids or [])
        news.finish_reason, news.error = status.finish_reason, error
        return news

    def _news(self, request: Request, token_ids: list[int]) -> EngineCoreOutput:
        # By position: keywords would double the time.
        name, start = request.request_id, request.first_scheduled_time
        num_cached, num_preemptions = request.num_cached_tokens, request.num_preemptions
        return EngineCoreOutput(name, token_ids, num_cached, num_preemptions, start)
