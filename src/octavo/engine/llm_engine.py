"""LLMEngine: input processor, engine core and output processor bound together, in one process.

The offline facade and, later, the server's front end drive requests through this one object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from octavo.config.engine import EngineArgs
from octavo.config.model import ModelConfig
from octavo.config.resolve import resolve
from octavo.core.scheduler_output import EngineCoreOutput
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.engine_core import EngineCore
from octavo.engine.input_processor import InputProcessor, ProcessedInput
from octavo.engine.metrics import EngineMetrics
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.engine.turns import InterruptGate, Turns
from octavo.errors import EngineDeadError
from octavo.outputs import RequestOutput, RequestOutputKind
from octavo.sampling_params import SamplingParams
from octavo.worker.device import probe_device


class LLMEngine:
    """Owns an EngineCore. Calls from several threads take turns, a step at a time.

    Outputs of a request that was queued with a `sink` go there, whoever drives the engine; those of
    the others are returned by `step`. Ctrl-C takes effect only where a turn waits for a result, or
    between turns, so no output of any request is lost. `Turns.run` says who cannot have a turn.
    """

    def __init__(self, args: EngineArgs, model: ModelConfig) -> None:
        config = resolve(args, model, probe_device(args.device))
        self.tokenizer: Tokenizer | None = None
        if not args.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(args.tokenizer or model.path)
        self.chat_template = ChatTemplate.load(args.chat_template, self.tokenizer)
        self.metrics = EngineMetrics()
        self.core = EngineCore(config, self.metrics.record_step)
        self.config = self.core.config
        self.process = InputProcessor(self.config, self.tokenizer).process
        """The first half of add_request: every check that does not depend on what is running.

        Takes no turn: a long text is no reason for the others to wait.
        """
        self._outputs = OutputProcessor(self.tokenizer, self.metrics)
        self._sinks: dict[str, deque[RequestOutput]] = {}
        self._unclaimed: list[RequestOutput] = []
        self._to_abort: deque[str] = deque()
        self._turns = Turns()

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Validate and queue one prompt (with its n completions); `step` brings its outputs.

        Raises InvalidRequestError naming the field; nothing is queued then.
        """
        processed = self.process(request_id, prompt, params, priority, arrival_time)
        self.queue(request_id, processed, output_kind)

    def queue(
        self,
        request_id: str,
        processed: ProcessedInput,
        output_kind: RequestOutputKind | None = None,
        sink: deque[RequestOutput] | None = None,
    ) -> None:
        """The second half of add_request. With a `sink`, outputs are appended there."""
        children = processed.engine_requests
        parent = self._outputs.prepare(request_id, processed.prompt_text, children, output_kind)

        def add(_: InterruptGate) -> None:
            self._abort_queued()
            self._outputs.add(parent)
            try:
                for child in children:
                    self.core.add_request(child)
            except BaseException:
                self._abort([request_id])
                raise
            if sink is not None:
                self._sinks[request_id] = sink

        self._turns.run(add)

    def step(self) -> list[RequestOutput]:
        """Run the loop once; returns the news of requests that have no sink."""

        def pump(gate: InterruptGate) -> list[RequestOutput]:
            self._pump(gate)
            unclaimed, self._unclaimed = self._unclaimed, []
            return unclaimed

        return self._news_of(pump)

    def wait_for(self, sink: deque[RequestOutput], request_ids: Iterable[str]) -> None:
        """Run the loop until the sink has an output.

        Raises EngineDeadError if none of the requests lives any more: nothing would ever come.
        """

        def pump(gate: InterruptGate) -> None:
            if sink:
                return
            self._pump(gate)
            # Only then: looking through thousands of ended requests takes as long as a step.
            idle = not sink and not self.core.has_work()
            if idle and not any(self._outputs.has_request(name) for name in request_ids):
                raise EngineDeadError("the requests ended without an output")

        while not sink:
            self._turns.run(pump)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests; returns what they still had to say, their last outputs at the end.

        Unknown ids are ignored.
        """
        names = [request_ids] if isinstance(request_ids, str) else request_ids

        def end(_: InterruptGate) -> list[RequestOutput]:
            last = self._abort(names)
            ended = {output.request_id for output in last}
            # News that another thread's turn brought, and nobody has fetched yet.
            earlier = [output for output in self._unclaimed if output.request_id in ended]
            self._unclaimed = [one for one in self._unclaimed if one.request_id not in ended]
            return earlier + last

        return self._news_of(end)

    def abort_soon(self, request_ids: Iterable[str]) -> None:
        """Like abort, but done by the next call; never waits and never fails.

        For finalisers: the garbage collector runs them in any thread, amid any step.
        """
        self._to_abort.extend(request_ids)

    def has_work(self) -> bool:
        """True while a request lives, a launched step is not settled, or `step` has news to return."""
        return bool(self._unclaimed or self._to_abort) or self.core.has_work()

    def drain(self) -> None:
        """Run the loop until nothing lives and nothing is in flight."""
        self._turns.run(self._drain)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests run."""

        def reset(gate: InterruptGate) -> bool:
            self._abort_queued()
            if not self._outputs.num_requests:
                self._drain(gate)
            return self.core.scheduler.reset_prefix_cache()

        return self._turns.run(reset)

    def shutdown(self) -> None:
        """Stop the worker. May be called twice; does nothing in a forked child, which has none."""

        def stop(gate: InterruptGate) -> None:
            with gate.open():
                self.core.shutdown()

        with suppress(EngineDeadError):
            self._turns.run(stop)

    def _news_of(self, work: Callable[[InterruptGate], list[RequestOutput]]) -> list[RequestOutput]:
        """What a turn brings; from Ctrl-C at its end it is kept for the next `step`."""
        news: list[RequestOutput] = []

        def turn(gate: InterruptGate) -> None:
            nonlocal news
            news = work(gate)

        try:
            self._turns.run(turn)
        except BaseException:
            self._unclaimed[:0] = news
            raise
        return news

    def _abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        outputs, children = self._outputs.abort(request_ids)
        self.core.abort(children)
        for output in outputs:
            if output.request_id in self._sinks:
                self._sinks.pop(output.request_id).append(output)
        return outputs

    def _abort_queued(self) -> None:
        while self._to_abort:
            request_id = self._to_abort.popleft()
            has_sink = request_id in self._sinks
            last = self._abort([request_id])
            if not has_sink:
                self._unclaimed += last

    def _drain(self, gate: InterruptGate) -> None:
        while self._to_abort or self.core.has_work():
            self._pump(gate)

    def _pump(self, gate: InterruptGate) -> None:
        self._abort_queued()
        self.core.step(self._deliver, gate.open)

    def _deliver(self, news: list[EngineCoreOutput]) -> None:
        outputs, stopped = self._outputs.process(news)
        if stopped:
            self.core.abort(stopped)
        if not self._sinks:
            self._unclaimed += outputs
            return
        for output in outputs:
            self._sinks.get(output.request_id, self._unclaimed).append(output)
            if output.finished:
                self._sinks.pop(output.request_id, None)
