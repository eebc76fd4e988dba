"""What a caller gets back: one RequestOutput a request, growing while it streams, or a vector."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from octavo.sampling_params import RequestOutputKind as RequestOutputKind


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """EOS, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the context limit."""
    ABORT = "abort"
    """The caller took the request back."""
    ERROR = "error"
    """This request failed; `CompletionOutput.error` says why."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token under the raw model distribution (before penalties)."""

    logprob: float
    rank: int | None = None
    """1 is the most likely token."""
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Scores at one position as they leave the runner: the chosen token first, then the top k."""

    token_ids: list[int]
    logprobs: list[float]
    """fp32 values; -inf is written as the lowest finite fp32, so that JSON can carry it."""
    rank: int
    """Rank of the chosen token; 1 is the most likely."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n completions of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry an output token: the sampled token and the top k."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for EOS and for length."""
    error: str | None = None

    @property
    def finished(self) -> bool:
        """True once finish_reason is set."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of time.monotonic(), and what the engine did for it."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Arrival to first scheduled, seconds."""
        return _span(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: arrival to the first output token, seconds."""
        return _span(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; None with fewer than two tokens."""
        span = _span(self.first_token_time, self.last_token_time)
        if span is None or self.num_generation_tokens < 2:
            return None
        return span / (self.num_generation_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Arrival to the end, seconds."""
        return _span(self.arrival_time, self.finished_time)


@dataclass(slots=True)
class RequestOutput:
    """A request and what it has produced so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token; the first is None: nothing predicts it."""
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V came from the prefix cache."""
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]
    """fp32 values; empty if there is an error."""
    error: str | None = None


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A text as token ids, and its vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
