"""One request inside the core: its tokens, its counters and their invariants. Never torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from octavo.outputs import FinishReason
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A validated request as the front end hands it to the core: plain data, one completion."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """Random stream of this completion, 64 bits, already split for n > 1."""
    eos_token_ids: tuple[int, ...] = ()
    """Empty with ignore_eos."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int = 16
    """Output limit after the context limit was applied."""
    arrival_time: float = 0.0
    """time.monotonic() seconds."""
    priority: int = 0
    """Lower runs first under the priority policy."""
    cache_salt: str | None = None
    """Requests share prefix blocks only with the same salt."""


class RequestStatus(IntEnum):
    """Where a request is. Everything from FINISHED_STOPPED on has ended."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KV = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8

    @property
    def finished(self) -> bool:
        """True if the request has ended, for whatever reason."""
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason told to the caller; None while the request lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@dataclass(slots=True, eq=False)
class Request:
    """Core state of one request.

    Two clocks: *settled* counters change only when a step's result is applied; *planned* values
    add what launched steps will have done at most, so the next step can be scheduled before the
    last one came back.
    """

    engine_request: EngineRequest
    order: tuple[int, int] = (0, 0)
    """Right to run, lower first: (0, arrival) under FCFS, (priority, arrival) under priority."""
    output_limit: int = 0
    """Output tokens at most, by max_tokens and the context limit; 0: prompt scores only."""
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens whose value is known here; tokens still on the device are not."""
    spec_token_ids: list[int] = field(default_factory=list)
    """Draft tokens to verify in the next step; empty without speculation."""
    num_computed_tokens: int = 0
    """Settled: tokens whose K/V is valid in the cache, prefix hits included."""
    num_inflight_tokens: int = 0
    """Upper bound of tokens that launched, unsettled steps will have computed."""
    num_inflight_samples: int = 0
    """Upper bound of output tokens that launched, unsettled steps will bring."""
    num_cached_tokens: int = 0
    """Reporting only: prompt tokens taken from the prefix cache at first admission."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of known tokens, extended as tokens become known."""
    num_prompt_scores: int = 0
    """Prompt positions whose score was delivered; used with prompt_logprobs only."""
    num_preemptions: int = 0
    num_bypassed: int = 0
    """Times a younger request was admitted past this one; bounds the bypass."""
    epoch: int = 0
    """Raised by each preemption: steps launched before it no longer count as computed."""
    first_scheduled_time: float | None = None
    request_id: str = field(init=False)
    """The id given by the front end."""
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        # Read several times a step for each request: plain attributes cost a third of properties.
        self.request_id = self.engine_request.request_id
        self.num_prompt_tokens = len(self.engine_request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """Computed tokens once all launched steps are settled, at most."""
        return self.num_computed_tokens + self.num_inflight_tokens

    @property
    def all_token_ids(self) -> list[int]:
        """A new list of the known tokens."""
        return self.engine_request.prompt_token_ids + self.output_token_ids
