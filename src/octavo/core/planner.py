"""Plans one step: which requests run how many tokens, who is admitted, who is preempted.

There are no phases. Each request catches num_planned_tokens up to num_tokens_with_spec under the
token budget; chunked prefill, decode, verification of drafts and recomputation all follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.inflight import LaunchedRequest
from octavo.core.kv_cache_manager import NO_HITS
from octavo.core.preemption import choose_victim
from octavo.core.request import Request, RequestStatus
from octavo.core.scheduler_output import NewRequestData, SchedulerOutput
from octavo.core.state import SchedulerState


@dataclass(slots=True)
class StepDraft:
    """A plan being made."""

    budget: int
    """Tokens left."""
    plan: SchedulerOutput = field(default_factory=lambda: SchedulerOutput(step_id=0))
    launched: list[LaunchedRequest] = field(default_factory=list)
    num_prefill_tokens: int = 0
    short_of_blocks: bool = False
    """A running request preempted or waits for deferred blocks: none behind it may take any."""


class Planner:
    """The planning half of the scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._kv = state.kv
        self._config = state.config

    def draft_step(self) -> StepDraft:
        """Running requests first, then waiting ones, each in order."""
        draft = StepDraft(self._config.max_num_batched_tokens)
        self._plan_running(draft)
        if not draft.short_of_blocks:
            self._admit_waiting(draft)
        draft.plan.removed_request_ids = self._state.removed_request_ids
        self._state.removed_request_ids = []
        return draft

    def _plan_running(self, draft: StepDraft) -> None:
        num_missing_blocks, block_size = self._kv.num_missing_blocks, self._kv.block_size
        wanted = [(request, num_wanted_tokens(request)) for request in self._state.running]
        active = [(request, num_wanted) for request, num_wanted in wanted if num_wanted > 0]
        num_behind = len(active)
        for request, num_wanted in active:
            if draft.budget == 0:
                return
            num_behind -= 1
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by one before it
            num_new = 1
            if num_wanted > 1:
                # One is left for each request behind, so that a long prefill starves no decode.
                num_new = self._chunk(num_wanted, max(1, draft.budget - num_behind))
            start = request.num_computed_tokens + request.num_inflight_tokens
            num_tokens = start + num_new
            # What was planned before has its blocks: one token more needs none amid a block.
            is_covered = num_new == 1 and start % block_size
            if not is_covered and (num_missing := num_missing_blocks(request, num_tokens)):
                block_ids = self._allocate_running(request, num_missing, draft)
                if block_ids is None:
                    continue
                draft.plan.new_block_ids[request.request_id] = block_ids
            self._plan_tokens(request, num_new, draft)

    def _chunk(self, num_wanted: int, budget: int) -> int:
        threshold = self._config.long_prefill_token_threshold
        return min(num_wanted, budget, threshold) if threshold > 0 else min(num_wanted, budget)

    def _plan_tokens(self, request: Request, num_new: int, draft: StepDraft) -> None:
        """Enter num_new tokens into the plan; drafts that do not fit any more are dropped."""
        plan, request_id, num_prompt = draft.plan, request.request_id, request.num_prompt_tokens
        start = request.num_computed_tokens + request.num_inflight_tokens
        num_known = num_prompt + len(request.output_token_ids) + request.num_inflight_samples
        num_drafts = start + num_new - num_known
        num_samples = 0
        if num_drafts >= 0 and request.output_limit > 0:
            num_samples = 1 + num_drafts
            plan.sampling_requests.add(request_id)
            if num_drafts > 0:
                plan.spec_token_ids[request_id] = request.spec_token_ids[:num_drafts]
        if request.spec_token_ids:
            request.spec_token_ids = []
        plan.num_scheduled_tokens[request_id] = num_new
        draft.budget -= num_new
        if start < num_prompt:
            draft.num_prefill_tokens += num_new
        draft.launched.append((request, request.epoch, num_new, num_samples))

    def _allocate_running(
        self, request: Request, num_missing: int, draft: StepDraft
    ) -> list[int] | None:
        """Blocks for a running request; those behind it are preempted if need be, or itself."""
        if draft.short_of_blocks:
            return None
        while num_missing > (num_free := self._kv.num_free_blocks):
            # Deferred blocks count: they are free as soon as the steps in flight are settled.
            num_coming = num_free + self._state.inflight.num_deferred_blocks
            draft.short_of_blocks = True
            if num_missing <= num_coming:
                return None
            behind = self._state.running.after(request)
            num_lacking = num_missing - num_coming
            victim = choose_victim(behind, num_lacking, self._kv.num_freeable_blocks)
            self._state.preempt(victim or request)
            if victim is None:
                return None
        return self._kv.grow(request, num_missing)

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Admit in order; one that does not fit is passed at most max_bypass times."""
        state, max_bypass = self._state, self._config.max_bypass
        if not len(state.waiting) or len(state.running) >= self._config.max_num_seqs:
            return
        admitted: list[Request] = []
        passed: list[Request] = []
        is_closed = False
        # Holders of blocks must be able to finish their known tokens, chunk by chunk.
        num_owed = sum(self._num_owed_blocks(state.requests[name]) for name in self._kv.holders)
        num_parked = len(self._kv.holders) - len(state.running)
        for request in state.waiting:
            if draft.budget == 0 or len(state.running) >= self._config.max_num_seqs:
                break
            is_parked = self._kv.holds(request)  # it was admitted before its remote load
            if not _may_be_admitted(request) or (is_closed and not is_parked):
                continue
            owed_before = self._num_owed_blocks(request) if is_parked else 0
            if self._admit(request, num_owed - owed_before, draft):
                num_owed += self._num_owed_blocks(request) - owed_before
                admitted.append(request)
                for older in passed:
                    older.num_bypassed += 1
            else:
                passed.append(request)
            # Closed once somebody has aged enough; the second bound is for the work of one step.
            # Parked ones go on: the blocks that the head lacks may be theirs.
            is_closed = len(passed) > max_bypass or any(
                older.num_bypassed >= max_bypass for older in passed
            )
            if is_closed and num_parked == 0:
                break
        for request in admitted:
            if request.status == RequestStatus.RUNNING:
                state.waiting.remove(request)

    def _num_owed_blocks(self, request: Request) -> int:
        num_tokens = request.num_tokens + request.num_inflight_samples
        return self._kv.num_owed_blocks(request, num_tokens)

    def _admit(self, request: Request, num_reserved_blocks: int, draft: StepDraft) -> bool:
        """Start it if all its known tokens fit; only the blocks of its first chunk are taken."""
        hits, num_external, is_async = NO_HITS, 0, False
        num_computed = request.num_computed_tokens
        if not self._kv.holds(request):  # it holds blocks only after a remote load
            hits, num_computed = self._kv.get_computed_blocks(request)
        if not self._kv.fits(request, request.num_tokens, hits, num_reserved_blocks):
            return False
        if not self._kv.holds(request):
            self._count_hits(request, num_computed)
            num_external, is_async = self._ask_connector(request, num_computed)
        num_start = num_computed + num_external
        num_new = 0 if is_async else self._chunk(request.num_tokens - num_start, draft.budget)
        block_ids = self._kv.allocate_slots(request, num_start + num_new, hits)
        assert block_ids is not None, "fits() covers more than this chunk"
        self._state.connector.update_state_after_alloc(request, block_ids, num_external)
        request.num_bypassed = 0
        if is_async:
            request.num_computed_tokens = num_computed
            request.status = RequestStatus.WAITING_FOR_REMOTE_KV
            return True
        self._state.start(request, num_start)
        draft.plan.new_requests.append(
            NewRequestData(
                request.engine_request,
                request.all_token_ids,
                self._kv.get_block_ids(request),
                num_start,
                score_start=request.num_prompt_scores + 1,  # nothing predicts position 0
            )
        )
        self._plan_tokens(request, num_new, draft)
        return True

    def _ask_connector(self, request: Request, num_computed: int) -> tuple[int, bool]:
        """External tokens to load; the last token is always computed here, as with hits."""
        # Loaded K/V comes without the hidden states that scores need, and behind windows a
        # connector would fill blocks that no token sees.
        wants_scores = request.engine_request.sampling_params.prompt_logprobs is not None
        if wants_scores or self._kv.has_windows:
            return 0, False
        connector = self._state.connector
        num_external, is_async = connector.get_num_new_matched_tokens(request, num_computed)
        num_external = min(num_external, request.num_tokens - 1 - num_computed)
        return num_external, is_async and num_external > 0

    def _count_hits(self, request: Request, num_hit_tokens: int) -> None:
        if request.first_scheduled_time is None and self._kv.pool.enable_caching:
            request.num_cached_tokens = num_hit_tokens
            self._state.totals.prefix_cache_queries += request.num_prompt_tokens
            self._state.totals.prefix_cache_hits += num_hit_tokens


def num_wanted_tokens(request: Request) -> int:
    """Tokens between planned and target; drafts past the output limit are dropped."""
    limit = request.output_limit
    num_output = len(request.output_token_ids) + request.num_inflight_samples
    if num_output >= limit > 0:
        return 0
    num_tokens_with_spec = request.num_prompt_tokens + num_output
    if request.spec_token_ids:
        del request.spec_token_ids[max(0, limit - num_output - 1) :]
        num_tokens_with_spec += len(request.spec_token_ids)
    return num_tokens_with_spec - request.num_computed_tokens - request.num_inflight_tokens


def _may_be_admitted(request: Request) -> bool:
    """Not waiting for something else; and never two incarnations in the runner at once."""
    if request.num_inflight_tokens or request.num_inflight_samples:
        return False
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
