"""The offline facade: `LLM(model).generate(prompts, SamplingParams(...))`, in the names vLLM uses."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

from tqdm import tqdm

from octavo.config.encoder import PoolingType
from octavo.config.resolve import make_args
from octavo.engine.embedding_engine import EmbeddingEngine
from octavo.engine.input_processor import MAX_IDS, ProcessedInput, Prompt
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError
from octavo.outputs import EmbeddingRequestOutput, RequestOutput, RequestOutputKind
from octavo.sampling_params import SamplingParams
from octavo.weights.checkpoint import load_model_config

_progress = partial(tqdm, desc="Requests", dynamic_ncols=True)


class LLM:
    """A model ready to generate, or to embed. Use it as a context manager, or call `shutdown`.

    model: a folder, a .gguf file or a Hugging Face id. Settings are those of
    `octavo.config.engine.EngineArgs`, by vLLM's names; unknown ones raise ConfigError.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self._engine: LLMEngine | EmbeddingEngine | None = None
        self._ids = count()
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        args = make_args({"model": name, **settings})
        config = load_model_config(args)
        engine = LLMEngine if config.encoder is None else EmbeddingEngine
        self._engine = engine(args, config)

    @property
    def engine(self) -> LLMEngine:
        """The running engine of a model that generates.

        Raises EngineDeadError after shutdown, InvalidRequestError for an embedding model.
        """
        engine = self._running()
        if isinstance(engine, EmbeddingEngine):
            text = f"{engine.config.model.path} is an embedding model: it has LLM.embed only"
            raise InvalidRequestError("model", text)
        return engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts together; returns one RequestOutput a prompt, in order.

        sampling_params: one for all or one a prompt. Every prompt is checked before any runs:
        InvalidRequestError names the field. A request that fails while running ends with
        finish_reason "error" and leaves the others alone.
        """
        requests = self._process(prompts, sampling_params, priority)
        finished = {}
        with _progress(total=len(requests), disable=not use_tqdm) as bar:
            for output in self._run(requests, RequestOutputKind.FINAL_ONLY):
                finished[output.request_id] = output
                bar.update()
        return [finished[request_id] for request_id in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Like `generate`, but yields news as they come, from all prompts interleaved.

        request_id of an output is the index of its prompt, as a string. Each output holds only what
        is new, unless SamplingParams.output_kind says otherwise. Closing the iterator aborts what
        still runs.
        """
        requests = self._process(prompts, sampling_params, priority)
        index_of = {request_id: str(index) for index, request_id in enumerate(requests)}
        for output in self._run(requests, None):
            output.request_id = index_of[output.request_id]
            yield output

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Render conversations with the chat template, then `generate`.

        messages: one conversation (a list of {"role", "content"}) or several.
        """
        prompts = self.render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_type: PoolingType | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, in order. For embedding models (BERT, RoBERTa).

        Every prompt is checked before any runs: InvalidRequestError names the field. One that is
        longer than max_model_len is refused, unless truncate_prompt_tokens says to how many tokens
        prompts are cut, special ones included and kept (-1: max_model_len). pooling_type ("mean" or
        "cls") and normalize: None means as the checkpoint says. A prompt without a finite vector
        has `outputs.error`, and leaves the others alone.
        """
        engine = self._running()
        if not isinstance(engine, EmbeddingEngine):
            text = f"{engine.config.model.path} generates text: it has no LLM.embed"
            raise InvalidRequestError("model", text)
        pooling = engine.pooling(pooling_type, normalize)
        texts = [engine.process(one, truncate_prompt_tokens) for one in _as_list(prompts)]
        news = engine.embed(texts, pooling)
        outputs = _progress(news, total=len(texts), disable=not use_tqdm)
        return [
            EmbeddingRequestOutput(f"req-{next(self._ids)}", token_ids, output)
            for token_ids, output in zip(texts, outputs, strict=True)
        ]

    def render_chat(
        self, messages: Sequence[Any], *, chat_template: str | None = None, **options: Any
    ) -> list[Prompt]:
        """Prompts (token ids) of one or several conversations, ready for `generate`/`stream`."""
        if not isinstance(messages, list | tuple):
            raise InvalidRequestError("messages", f"must be a list, not {type(messages).__name__}")
        one = all(isinstance(message, Mapping) for message in messages)
        template = self.engine.chat_template
        if chat_template is not None:
            template = template.with_source(chat_template)
        tokenizer = self.get_tokenizer()
        return [
            tokenizer.encode(template.render(conversation, **options), add_special_tokens=False)
            for conversation in ([messages] if one else messages)
        ]

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError with skip_tokenizer_init."""
        if (tokenizer := self._running().tokenizer) is None:
            raise ConfigError("skip_tokenizer_init: this engine works on token ids only")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without sampling parameters gets; see EngineArgs.generation_config."""
        named: dict[str, Any] = dict(self.engine.config.model.sampling_defaults)
        return SamplingParams(**named)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stop the engine and free its memory. May be called twice."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _running(self) -> LLMEngine | EmbeddingEngine:
        if self._engine is None:
            raise EngineDeadError("the engine was shut down")
        return self._engine

    def _process(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> dict[str, ProcessedInput]:
        """Every prompt checked, by the request id that it gets, in order; nothing runs yet."""
        engine = self.engine
        batch = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each("sampling_params", sampling_params, len(batch))
        priorities = _one_each("priority", 0 if priority is None else priority, len(batch))
        now = time.monotonic()
        return {
            (name := f"req-{next(self._ids)}"): engine.process(name, prompt, param, rank, now)
            for prompt, param, rank in zip(batch, params, priorities, strict=True)
        }

    def _run(
        self, requests: Mapping[str, ProcessedInput], kind: RequestOutputKind | None
    ) -> Iterator[RequestOutput]:
        """Outputs as they come. kind None: as the parameters say, else deltas."""
        engine = self.engine
        sink: deque[RequestOutput] = deque()
        num_unfinished = len(requests)
        try:
            for request_id, processed in requests.items():
                asked = processed.engine_requests[0].sampling_params.output_kind
                engine.queue(request_id, processed, kind or asked or RequestOutputKind.DELTA, sink)
            while num_unfinished:
                engine.wait_for(sink, requests)
                output = sink.popleft()
                num_unfinished -= output.finished
                yield output
        finally:
            if num_unfinished:  # not `abort`: the garbage collector may be who closes this
                engine.abort_soon(requests)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping | range):  # a range may be longer than memory
        return [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Iterable):
        text = f"must be text, token ids or a list of these, not {type(prompts).__name__}"
        raise InvalidRequestError("prompts", text)
    batch: list[Any] = list(islice(prompts, MAX_IDS + 1))
    if len(batch) > MAX_IDS:
        raise InvalidRequestError("prompts", f"must not have more than {MAX_IDS} items")
    is_one_prompt = batch and all(isinstance(item, int) for item in batch)  # of token ids
    return [batch] if is_one_prompt else batch


def _one_each(name: str, value: Any, number: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * number
    if len(value) != number:
        raise InvalidRequestError(name, f"{len(value)} given for {number} prompts")
    return list(value)
