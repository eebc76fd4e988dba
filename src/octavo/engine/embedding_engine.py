"""EmbeddingEngine: prompts in, a vector each out. A text is one pass, so nothing is scheduled or cached."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from octavo.config.encoder import EncoderConfig, PoolingType
from octavo.config.engine import EngineArgs, EngineConfig
from octavo.config.model import ModelConfig
from octavo.config.resolve import resolve
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import EngineDeadError, InvalidRequestError, expect, shown
from octavo.executor.calls import OwnThread
from octavo.outputs import EmbeddingOutput
from octavo.worker.device import probe_device
from octavo.worker.encoder_worker import EncoderWorker

logger = logging.getLogger(__name__)


class EmbeddingEngine:
    """Owns an EncoderWorker and its thread. Calls from several threads take turns, a step at a time."""

    def __init__(self, args: EngineArgs, model: ModelConfig) -> None:
        self.config: EngineConfig = resolve(args, model, probe_device(args.device))
        self.tokenizer: Tokenizer | None = None
        if not args.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(args.tokenizer or model.path)
        self._inputs = InputProcessor(self.config, self.tokenizer)
        self._process_id = os.getpid()
        # One thread, whoever calls: bits may depend on its number of OpenMP threads.
        self._thread = OwnThread("octavo-worker")
        try:
            self._worker = self._thread.submit(EncoderWorker, self.config).result()
        except BaseException:
            # Not waited for: after an interrupt it may still be loading, and ends when it has.
            self._thread.close(wait=False)
            raise

    def process(self, prompt: Prompt, truncate_prompt_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt, checked. A longer one than max_model_len is refused, unless cut.

        truncate_prompt_tokens: see LLM.embed. Raises InvalidRequestError naming the field.
        """
        longest = self.config.scheduler.max_model_len
        limit = truncate_prompt_tokens
        if limit is not None:
            least = 1 if self.tokenizer is None else self.tokenizer.num_special_tokens + 1
            field, wanted = "truncate_prompt_tokens", f"-1 or an integer from {least} to {longest}"
            limit = expect(field, limit, int, wanted)
            limit = longest if limit == -1 else limit
            if not least <= limit <= longest:
                raise InvalidRequestError(field, f"must be {wanted}, not {shown(limit)}")
        text, token_ids, cache_salt = self._inputs.read_prompt(prompt, limit)
        if cache_salt is not None:
            raise InvalidRequestError("cache_salt", "an embedding model has no cache")
        has_ids = isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None
        if text is not None and not text.strip() and not has_ids:
            raise InvalidRequestError("prompt", "is empty")
        if len(token_ids) > longest:
            text = f"{len(token_ids)} tokens do not fit into max_model_len={longest}"
            raise InvalidRequestError("prompt", f"{text}; truncate_prompt_tokens=-1 cuts it")
        return token_ids

    def pooling(self, pooling_type: PoolingType | None, normalize: bool | None) -> EncoderConfig:
        """The model's pooling with what is not None changed. Raises InvalidRequestError."""
        pooling = self.config.model.encoder
        assert pooling is not None
        if normalize is not None:
            expect("normalize", normalize, bool, "true or false")
            pooling = dataclasses.replace(pooling, normalize=normalize)
        if pooling_type is not None:
            known = get_args(PoolingType)
            if expect("pooling_type", pooling_type, str, "text") not in known:
                text = f"{shown(pooling_type)} is none of {known}"
                raise InvalidRequestError("pooling_type", text)
            pooling = dataclasses.replace(pooling, pooling_type=pooling_type)
        return pooling

    def embed(
        self, texts: Iterable[list[int]], pooling: EncoderConfig
    ) -> Iterator[EmbeddingOutput]:
        """One output a text (token ids from `process`), in order, as steps end.

        A step that fails is the error of its texts only. Raises EngineDeadError after shutdown.
        """
        if os.getpid() != self._process_id:
            raise EngineDeadError("the engine stayed in the process that made it")
        for step in self._steps(texts):
            try:
                pending = self._thread.submit(self._worker.embed, step, pooling)
            except RuntimeError as closed:
                raise EngineDeadError("the engine was shut down") from closed
            try:
                outputs = pending.result()
            except Exception as error:
                logger.exception("a step of %d texts failed", len(step))
                message = f"{type(error).__name__}: {error}"
                outputs = [EmbeddingOutput([], message) for _ in step]
            yield from outputs

    def shutdown(self) -> None:
        """Finish what runs and end the thread. May be called twice."""
        if os.getpid() == self._process_id:
            self._thread.close()

    def _steps(self, texts: Iterable[list[int]]) -> Iterator[list[list[int]]]:
        """Whole texts in order, as many at once as max_num_batched_tokens and max_num_seqs allow."""
        limits = self.config.scheduler
        step: list[list[int]] = []
        room = limits.max_num_batched_tokens
        for text in texts:
            if len(text) > room or len(step) == limits.max_num_seqs:
                yield step
                step, room = [], limits.max_num_batched_tokens
            step.append(text)
            room -= len(text)
        if step:
            yield step
