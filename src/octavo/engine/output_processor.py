"""What the core produced, as RequestOutputs.

Owns the front end's state of each live request: detokenizers, scores, times, and how the n
completions come together under the request they belong to. News of unknown ids is ignored: with
overlapped steps, tokens still arrive for a request that has just ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from octavo.core.request import EngineRequest
from octavo.core.scheduler_output import EngineCoreOutput
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.metrics import CompletionTimes, EngineMetrics
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError
from octavo.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Completion:
    """One of the n completions."""

    request_id: str
    """The id that the core knows."""
    parent: ParentRequest
    output: CompletionOutput
    """Everything so far; its text stays empty until it is asked for."""
    detokenizer: IncrementalDetokenizer | None
    times: CompletionTimes = field(default_factory=CompletionTimes)
    num_sent_tokens: int = 0
    unsent_text: list[str] = field(default_factory=list)
    """For deltas only."""
    changed: bool = False
    """There is news since the last output."""
    num_preemptions: int = 0

    def add_text(self, text: str) -> None:
        """Text that the detokenizer released."""
        if text:
            self.changed = True
            if self.parent.kind is RequestOutputKind.DELTA:
                self.unsent_text.append(text)

    def snapshot(self, is_delta: bool) -> CompletionOutput:
        """Everything so far, or since the last delta, as a copy that later news does not change."""
        self.changed, out = False, self.output
        start, text = 0, ""
        if is_delta:
            start, self.num_sent_tokens = self.num_sent_tokens, len(out.token_ids)
            if self.unsent_text:
                text, self.unsent_text = "".join(self.unsent_text), []
        elif self.detokenizer is not None:
            text = self.detokenizer.text
        # Once a token: dataclasses.replace, or keywords, would take twice as long.
        copy = CompletionOutput(out.index, text, out.token_ids[start:])
        if out.logprobs is not None:
            copy.cumulative_logprob, copy.logprobs = out.cumulative_logprob, out.logprobs[start:]
        if out.finish_reason is not None:
            copy.finish_reason, copy.stop_reason = out.finish_reason, out.stop_reason
            copy.error = out.error
        return copy


@dataclass(slots=True, eq=False)
class ParentRequest:
    """A request as the caller knows it, of `OutputProcessor.prepare`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    kind: RequestOutputKind
    metrics: RequestMetrics
    """Shared with the outputs, so it keeps up to date until the request ends."""
    num_running: int
    """Completions that have not ended."""
    completions: list[_Completion] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    def make_output(self) -> RequestOutput | None:
        """The output that is due now, if any."""
        is_delta, is_finished = self.kind is RequestOutputKind.DELTA, self.num_running == 0
        if not (is_delta or is_finished) and self.kind is RequestOutputKind.FINAL_ONLY:
            return None
        told = [c for c in self.completions if c.changed]
        if not told:
            return None
        scores = self.prompt_logprobs
        if scores is not None:
            if len(scores) < len(self.prompt_token_ids) and not is_finished:
                scores = None  # a sibling was faster than the completion that scores it
            elif is_delta:
                self.prompt_logprobs = None  # told once
        outputs = [each.snapshot(is_delta) for each in (told if is_delta else self.completions)]
        return self._output(outputs, is_finished, scores)

    def failed_output(self, error: str) -> RequestOutput:
        """What is told if `make_output` fails; its completions have ended."""
        failed = FinishReason.ERROR
        outputs = [
            CompletionOutput(c.output.index, finish_reason=failed, error=error)
            for c in self.completions
        ]
        return self._output(outputs, True, None)

    def _output(
        self,
        outputs: list[CompletionOutput],
        is_finished: bool,
        scores: list[dict[int, Logprob] | None] | None,
    ) -> RequestOutput:
        name, prompt, prompt_ids = self.request_id, self.prompt, self.prompt_token_ids
        num_cached, metrics = self.num_cached_tokens, self.metrics
        return RequestOutput(
            name, prompt, prompt_ids, outputs, is_finished, scores, num_cached, metrics
        )


class OutputProcessor:
    """Live requests of the front end. Not thread-safe, except `prepare`."""

    def __init__(self, tokenizer: Tokenizer | None, metrics: EngineMetrics | None = None) -> None:
        self.metrics = metrics or EngineMetrics()
        self._tokenizer = tokenizer
        self._parents: dict[str, ParentRequest] = {}
        self._completions: dict[str, _Completion] = {}
        self._decoded: dict[int, str] = {}

    def has_request(self, request_id: str) -> bool:
        """True while the request, or a completion with this id, lives."""
        return request_id in self._parents or request_id in self._completions

    @property
    def num_requests(self) -> int:
        """Live requests."""
        return len(self._parents)

    def prepare(
        self,
        request_id: str,
        prompt_text: str | None,
        engine_requests: Sequence[EngineRequest],
        output_kind: RequestOutputKind | None = None,
    ) -> ParentRequest:
        """What `add` takes: all the work that may be long. Changes nothing.

        output_kind None: the one in the sampling params.
        """
        first = engine_requests[0]
        params = first.sampling_params
        parent = ParentRequest(
            request_id=request_id,
            prompt=prompt_text,
            prompt_token_ids=[*first.prompt_token_ids],  # the caller's own, to change as it likes
            kind=output_kind or params.output_kind or RequestOutputKind.CUMULATIVE,
            metrics=RequestMetrics(first.arrival_time),
            num_running=len(engine_requests),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        for index, request in enumerate(engine_requests):
            output = CompletionOutput(index)
            if params.logprobs is not None:
                output.logprobs, output.cumulative_logprob = [], 0.0
            detokenizer, ids = None, request.prompt_token_ids
            if self._tokenizer is not None and params.detokenize:
                detokenizer = IncrementalDetokenizer(self._tokenizer, ids, params)
            completion = _Completion(request.request_id, parent, output, detokenizer)
            parent.completions.append(completion)
        return parent

    def add(self, parent: ParentRequest) -> None:
        """Expect news of it. Raises InvalidRequestError if one of its ids is in use."""
        ids = [parent.request_id, *(c.request_id for c in parent.completions)]
        if any(self.has_request(i) for i in ids):
            raise InvalidRequestError("request_id", f"{parent.request_id!r} is already running")
        self._parents[parent.request_id] = parent
        self._completions.update({c.request_id: c for c in parent.completions})

    def process(
        self, core_outputs: Iterable[EngineCoreOutput], now: float | None = None
    ) -> tuple[list[RequestOutput], list[str]]:
        """Apply the news of a step. `now` defaults to time.monotonic().

        Returns the outputs that are due, and ids of completions that ended here while the core
        still runs them (a stop string): the core must abort these.
        """
        now = time.monotonic() if now is None else now
        parents: dict[str, ParentRequest] = {}
        to_abort: list[str] = []
        num_tokens, gaps = 0, dict[float, int]()
        for news in core_outputs:
            completion = self._completions.get(news.request_id)
            if completion is None:
                continue
            try:
                num_tokens += self._apply(completion, news, now, gaps)
            except Exception as error:
                self._end_alone(completion, error, now)
            if news.finish_reason is None and completion.output.finish_reason is not None:
                to_abort.append(completion.request_id)
            parents[completion.parent.request_id] = completion.parent
        self.metrics.record_tokens(gaps, num_tokens)
        return self._outputs_of(parents.values(), to_abort, now), to_abort

    def abort(
        self, request_ids: Iterable[str], now: float | None = None
    ) -> tuple[list[RequestOutput], list[str]]:
        """End requests with what they have. Unknown ids are ignored.

        Returns their last outputs and the ids of the completions that the core must abort.
        """
        now = time.monotonic() if now is None else now
        parents: dict[str, ParentRequest] = {}
        to_abort: list[str] = []
        for request_id in request_ids:
            parent = self._parents.get(request_id)
            if parent is None:
                continue
            for completion in parent.completions:
                if completion.output.finished:
                    continue
                to_abort.append(completion.request_id)
                try:
                    if completion.detokenizer is not None:
                        completion.add_text(completion.detokenizer.update((), finished=True))
                    self._finish(completion, FinishReason.ABORT, now)
                except Exception as error:
                    self._end_alone(completion, error, now)
            parents[request_id] = parent
        return self._outputs_of(parents.values(), to_abort, now), to_abort

    def _outputs_of(
        self, parents: Iterable[ParentRequest], to_abort: list[str], now: float
    ) -> list[RequestOutput]:
        outputs = []
        for parent in parents:
            try:
                output = parent.make_output()
            except Exception as error:
                for completion in [c for c in parent.completions if not c.output.finished]:
                    to_abort.append(completion.request_id)
                    self._end_alone(completion, error, now)
                output = parent.failed_output(f"{type(error).__name__}: {error}")
            if output is not None:
                outputs.append(output)
        return outputs

    def _end_alone(self, completion: _Completion, error: Exception, now: float) -> None:
        """What goes wrong with a completion is its error: a bug must not reach the others."""
        logger.error("output of request %s failed", completion.request_id, exc_info=error)
        completion.output.error = f"{type(error).__name__}: {error}"
        if not completion.output.finished:
            self._finish(completion, FinishReason.ERROR, now)

    def _apply(
        self, completion: _Completion, news: EngineCoreOutput, now: float, gaps: dict[float, int]
    ) -> int:
        """Returns how many of the new tokens count: all, or up to the end of a stop string."""
        parent, output = completion.parent, completion.output
        metrics = parent.metrics
        if news.num_preemptions != completion.num_preemptions:
            metrics.num_preemptions += news.num_preemptions - completion.num_preemptions
            completion.num_preemptions = news.num_preemptions
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = news.first_scheduled_time
        if output.index == 0:
            parent.num_cached_tokens = news.num_cached_tokens
            if news.prompt_logprobs is not None and parent.prompt_logprobs is not None:
                parent.prompt_logprobs += [self._logprobs(s) for s in news.prompt_logprobs]
        detokenizer, token_ids = completion.detokenizer, news.new_token_ids
        num_tokens = len(token_ids)
        if detokenizer is not None:
            num_tokens = self._add_text(completion, detokenizer, news)
        if num_tokens:
            completion.changed = True
            output.token_ids += (
                token_ids if num_tokens == len(token_ids) else token_ids[:num_tokens]
            )
            if output.logprobs is not None:
                self._add_logprobs(output, news, num_tokens)
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                self.metrics.record_ttft(now - metrics.arrival_time)
            metrics.last_token_time = now
            metrics.num_generation_tokens += num_tokens
            completion.times.add(num_tokens, now, gaps)
        if detokenizer is not None and detokenizer.stop_string is not None:
            output.stop_reason = detokenizer.stop_string
            self._finish(completion, FinishReason.STOP, now)
        elif news.finish_reason is not None:
            output.error, output.stop_reason = news.error, news.stop_reason
            self._finish(completion, news.finish_reason, now)
        return num_tokens

    def _add_text(
        self, completion: _Completion, detokenizer: IncrementalDetokenizer, news: EngineCoreOutput
    ) -> int:
        before = detokenizer.num_tokens
        text = detokenizer.update(
            news.new_token_ids,
            stop_token=news.finish_reason is FinishReason.STOP,
            finished=news.finish_reason is not None,
        )
        completion.add_text(text)
        return detokenizer.num_tokens - before

    def _add_logprobs(
        self, output: CompletionOutput, news: EngineCoreOutput, num_tokens: int
    ) -> None:
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        assert news.logprobs is not None, "the core sent no scores"
        for scores in news.logprobs[:num_tokens]:
            output.logprobs.append(self._logprobs(scores))
            output.cumulative_logprob += scores.logprobs[0]

    def _finish(self, completion: _Completion, reason: FinishReason, now: float) -> None:
        """Forget the completion; what cannot be counted is logged, for nobody is left to fail."""
        completion.output.finish_reason = reason
        completion.changed = True
        del self._completions[completion.request_id]
        parent = completion.parent
        parent.num_running -= 1
        if not parent.num_running:
            del self._parents[parent.request_id]
            parent.metrics.finished_time = now
        try:
            self.metrics.record_completion(completion.times, reason)
            if not parent.num_running:
                self.metrics.record_request(parent.metrics, len(parent.prompt_token_ids))
        except Exception:
            logger.exception("request %s is missing in the metrics", completion.request_id)

    def _logprobs(self, scores: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the top k, each id once."""
        result: dict[int, Logprob] = {}
        ranks = chain((scores.rank,), range(1, len(scores.token_ids)))
        for token_id, value, rank in zip(scores.token_ids, scores.logprobs, ranks, strict=True):
            if token_id not in result:
                result[token_id] = Logprob(value, rank, self._decode(token_id))
        return result

    def _decode(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if (text := self._decoded.get(token_id)) is None:
            text = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            self._decoded[token_id] = text
        return text
