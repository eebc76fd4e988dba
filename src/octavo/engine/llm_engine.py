"""LLMEngine: input processor, engine core and output processor bound together, in one process.

The offline facade and, later, the server's front end drive requests through this one object.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from octavo.config.engine import EngineArgs, EngineConfig
from octavo.config.resolve import resolve
from octavo.core.scheduler_output import SchedulerStats
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.engine_core import EngineCore
from octavo.engine.input_processor import InputProcessor, ProcessedInput
from octavo.engine.metrics import EngineMetrics
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import EngineDeadError, OctavoError
from octavo.outputs import RequestOutput, RequestOutputKind
from octavo.sampling_params import SamplingParams
from octavo.weights.checkpoint import load_model_config
from octavo.worker.device import probe_device


class LLMEngine:
    """Owns an EngineCore. Calls from several threads take turns; each step runs under one lock.

    Outputs of a request that was queued with a `sink` go there, whoever drives the engine; those of
    the others are returned by `step`.
    """

    def __init__(self, args: EngineArgs) -> None:
        model = load_model_config(args)
        config = resolve(args, model, probe_device(args.device))
        self.tokenizer: Tokenizer | None = None
        if not args.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(args.tokenizer or model.path)
        self.chat_template = ChatTemplate.load(args.chat_template, self.tokenizer)
        self._core = EngineCore(config)
        self.metrics = EngineMetrics()
        self._inputs = InputProcessor(self.config, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, self.metrics)
        self._sinks: dict[str, deque[RequestOutput]] = {}
        self._unclaimed: list[RequestOutput] = []
        self._recorded: SchedulerStats | None = None
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def config(self) -> EngineConfig:
        """The resolved settings, with the reason of each."""
        return self._core.config

    @property
    def core(self) -> EngineCore:
        """The loop, for inspection."""
        return self._core

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

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> ProcessedInput:
        """The first half of add_request: every check that does not depend on what is running."""
        with self._lock:
            return self._inputs.process(request_id, prompt, params, priority, arrival_time)

    def queue(
        self,
        request_id: str,
        processed: ProcessedInput,
        output_kind: RequestOutputKind | None = None,
        sink: deque[RequestOutput] | None = None,
    ) -> None:
        """The second half of add_request. With a `sink`, outputs are appended there."""
        children = processed.engine_requests
        with self._lock:
            self._outputs.add_request(request_id, processed.prompt_text, children, output_kind)
            try:
                for child in children:
                    self._core.add_request(child)
            except OctavoError:
                self.abort([request_id])
                raise
            if sink is not None:
                self._sinks[request_id] = sink

    def step(self) -> list[RequestOutput]:
        """Run the loop once; returns the news of requests that have no sink."""
        with self._lock:
            self._pump()
            unclaimed, self._unclaimed = self._unclaimed, []
            return unclaimed

    def wait_for(self, sink: deque[RequestOutput], request_ids: Iterable[str]) -> None:
        """Run the loop until the sink has an output.

        Raises EngineDeadError if none of the requests lives any more: nothing would ever come.
        """
        while not sink:
            with self._lock:
                if sink:
                    return
                if not any(self._outputs.has_request(name) for name in request_ids):
                    raise EngineDeadError("the requests ended without an output")
                self._pump()

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests; returns their last outputs. Unknown ids are ignored."""
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        with self._lock:
            outputs, children = self._outputs.abort(request_ids)
            self._core.abort(children)
            for output in outputs:
                if (sink := self._sinks.pop(output.request_id, None)) is not None:
                    sink.append(output)
            return outputs

    def has_work(self) -> bool:
        """True while a request lives or a launched step is not settled."""
        return self._core.has_work()

    def drain(self) -> None:
        """Run the loop until nothing lives and nothing is in flight."""
        with self._lock:
            while self.has_work():
                self._pump()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests run."""
        with self._lock:
            if not self._outputs.num_requests:
                self.drain()
            return self._core.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stop the worker. May be called twice."""
        with self._lock:
            self._core.shutdown()

    def _pump(self) -> None:
        if os.getpid() != self._pid:
            raise EngineDeadError("the worker thread did not survive fork(); make an engine here")
        outputs, stopped = self._outputs.process(self._core.step())
        if stopped:
            self._core.abort(stopped)
        for output in outputs:
            sink = self._sinks.get(output.request_id)
            if sink is None:
                self._unclaimed.append(output)
                continue
            sink.append(output)
            if output.finished:
                del self._sinks[output.request_id]
        self._record_plans()

    def _record_plans(self) -> None:
        """Every plan made since the last call; with overlap that may be none or several."""
        log = self._core.step_log
        new = list(takewhile(lambda stats: stats is not self._recorded, reversed(log)))
        for stats in reversed(new):
            self.metrics.record_step(stats)
        self._recorded = log[-1] if log else None
