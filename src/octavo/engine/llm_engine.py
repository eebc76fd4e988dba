"""LLMEngine: input processor, engine core and output processor bound together, in one process.

The offline facade and, later, the server's front end drive requests through this one object.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.config.engine import EngineArgs, EngineConfig
from octavo.config.resolve import resolve
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.engine_core import EngineCore
from octavo.engine.input_processor import InputProcessor, ProcessedInput
from octavo.engine.metrics import EngineMetrics
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import InvalidRequestError
from octavo.outputs import RequestOutput, RequestOutputKind
from octavo.sampling_params import SamplingParams
from octavo.weights.checkpoint import load_model_config
from octavo.worker.device import probe_device


class LLMEngine:
    """Owns an EngineCore. Not thread-safe: one caller adds, steps and aborts."""

    def __init__(self, args: EngineArgs) -> None:
        model = load_model_config(args)
        config = resolve(args, model, probe_device())
        self.tokenizer: Tokenizer | None = None
        if not args.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(args.tokenizer or model.path)
        self.chat_template = ChatTemplate.load(args.chat_template, self.tokenizer)
        self._core = EngineCore(config)
        self.metrics = EngineMetrics()
        self._inputs = InputProcessor(self.config, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, self.metrics)

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
        """Validate and queue one prompt (with its n completions).

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
        return self._inputs.process(request_id, prompt, params, priority, arrival_time)

    def queue(
        self,
        request_id: str,
        processed: ProcessedInput,
        output_kind: RequestOutputKind | None = None,
    ) -> None:
        """The second half of add_request."""
        children = processed.engine_requests
        self._outputs.add_request(request_id, processed.prompt_text, children, output_kind)
        try:
            for child in children:
                self._core.add_request(child)
        except InvalidRequestError:
            self.abort([request_id])
            raise

    def step(self) -> list[RequestOutput]:
        """Run the loop once; returns the requests with news."""
        core_outputs = self._core.step()
        outputs, stopped = self._outputs.process(core_outputs)
        if stopped:
            self._core.abort(stopped)
        self.metrics.record_step(self._core.stats())
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests; returns their last outputs. Unknown ids are ignored."""
        outputs, children = self._outputs.abort(request_ids)
        self._core.abort(children)
        return outputs

    def has_work(self) -> bool:
        """True while a request lives or a launched step is not settled."""
        return self._core.has_work()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests run."""
        if not self._outputs.num_requests:
            self._core.drain()
        return self._core.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stop the worker. May be called twice."""
        self._core.shutdown()
