"""What crosses between the core and the workers: plain, picklable data, only what changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.core.request import EngineRequest
from octavo.outputs import FinishReason, TokenLogprobs


@dataclass(slots=True)
class NewRequestData:
    """A request that enters the runner: first admission, or resumption after a preemption."""

    engine_request: EngineRequest
    token_ids: list[int]
    """All known tokens: the prompt, and the output before a preemption."""
    block_ids: list[int]
    """Block table as of this step."""
    num_computed_tokens: int
    """Prefix already in the cache when this step starts."""
    score_start: int
    """First prompt position whose score is still owed; only used with prompt_logprobs."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.engine_request.request_id


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step. Order of `num_scheduled_tokens` is the order of the batch."""

    step_id: int
    """Counts up from 1 without gaps; results come back in this order."""
    new_requests: list[NewRequestData] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    """Blocks appended to the tables of requests the runner already has."""
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens to run now, per request; an upper bound where drafts are still in flight."""
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Draft tokens among the scheduled ones that this step verifies."""
    sampling_requests: set[str] = field(default_factory=set)
    """Requests whose last scheduled token gets logits and a sampled token."""
    removed_request_ids: list[str] = field(default_factory=list)
    """Finished or preempted since the last plan: the runner frees their slots before anything."""
    kv_connector_metadata: Any = None
    """Opaque message from the connector's scheduler role to its worker role."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens in this step."""
        return sum(self.num_scheduled_tokens.values())

    @property
    def empty(self) -> bool:
        """True if there is nothing to run and nothing to tell the runner or its connector."""
        told = self.removed_request_ids or self.kv_connector_metadata is not None
        return not (self.num_scheduled_tokens or told)


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step produced."""

    step_id: int
    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """One token a sampling request; with speculation the accepted drafts and the bonus token."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Parallel to sampled_token_ids, for requests that asked."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Scores of the next prompt positions, in order, for requests that asked."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed in this step, with the reason; the others are unaffected."""


@dataclass(slots=True)
class EngineCoreOutput:
    """News of one request after a settled step."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class SchedulerStats:
    """A snapshot after a step, for metrics and the console."""

    num_running: int
    num_waiting: int
    num_blocks: int
    """Usable blocks of the pool, the null block excluded."""
    num_free_blocks: int
    """Blocks no request holds; some still carry cached prefixes."""
    num_scheduled_tokens: int
    num_prefill_tokens: int
    """Scheduled tokens of requests that were still short of their prompt."""
    num_preemptions: int
    """Since the start."""
    prefix_cache_queries: int
    """Prompt tokens looked up since the start."""
    prefix_cache_hits: int
    """Prompt tokens found since the start."""
