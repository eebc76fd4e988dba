"""One step on one rank: plan -> slots -> ForwardBatch -> hidden states -> logits -> sampled tokens.

`launch` only queues device work and returns; `LaunchedStep.collect` waits for it and makes plain data.
Nothing that the next launch needs passes through `collect`: sampled tokens are written into the
request slots on the device. What differs between devices is in `cpu_runner` and `gpu_runner`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from octavo.attention.base import CommonAttentionMetadata
from octavo.attention.groups import ModelBackend
from octavo.config.engine import EngineConfig
from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.kv_transfer.connector import KVConnectorWorker
from octavo.models.decoder import TORCH_DTYPES, DecoderModel
from octavo.outputs import TokenLogprobs
from octavo.sample.device_sampler import DeviceSample
from octavo.sample.sampler import SamplerOutput
from octavo.sample.state import SamplingState
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.prompt_scores import PromptScorer
from octavo.worker.request_slots import RequestSlots

logger = logging.getLogger(__name__)


PendingSample = SamplerOutput | DeviceSample
"""Tokens that the device is still choosing; `collect` gives them, once the step is done."""


@dataclass(slots=True)
class _Resident:
    """What the host remembers of a request in a slot."""

    num_prompt_tokens: int
    num_top: int | None
    """Of its prompt_logprobs."""
    next_score: int
    """First prompt position whose score is owed."""
    failed: bool = False
    """Its row may not be what the plans say, so it runs no more: it only waits to be removed."""


@dataclass(slots=True, eq=False)
class StepRows:
    """Which requests a step runs, in the order of its rows."""

    plan: SchedulerOutput
    """The first plan that ran these rows."""
    names: list[str]
    slots: np.ndarray
    """(R,) int64 request slots."""
    query_lens: np.ndarray
    """(R,) int64."""
    sampled_rows: np.ndarray
    """(S,) int64: rows that get a token."""
    sampled_ids: list[str]
    sampled_slots: list[int]
    scored: list[tuple[str, int, int]]
    """Requests that ask for prompt scores, with their first token and the one after the last."""

    def serves(self, plan: SchedulerOutput) -> bool:
        """True if a plan that admits and removes nobody runs the same rows."""
        mine = self.plan
        same_tokens = mine.num_scheduled_tokens == plan.num_scheduled_tokens
        return same_tokens and mine.sampling_requests == plan.sampling_requests


@dataclass(slots=True)
class LaunchedStep:
    """A step whose device work is queued."""

    step_id: int
    request_ids: list[str] = field(default_factory=list)
    """Requests of the sampled rows, in row order."""
    sampled: PendingSample | None = None
    done: torch.cuda.Event | None = None
    """None if the device was done when the launch returned."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def wait(self) -> None:
        """Wait for the device. May be called again after an interrupt."""
        if self.done is not None:
            self.done.synchronize()

    def collect(self) -> ModelRunnerOutput:
        """What the step brought, as plain data; after `wait`."""
        output = ModelRunnerOutput(
            self.step_id, prompt_logprobs=self.prompt_logprobs, errors=dict(self.errors)
        )
        if self.sampled is None:
            return output
        sampled = self.sampled.collect()
        if not (sampled.errors or sampled.logprobs):
            tokens = [[token_id] for token_id in sampled.token_ids]
            output.sampled_token_ids = dict(zip(self.request_ids, tokens, strict=True))
            return output
        for row, request_id in enumerate(self.request_ids):
            if row in sampled.errors:
                output.errors[request_id] = sampled.errors[row]
                continue
            output.sampled_token_ids[request_id] = [sampled.token_ids[row]]
            if row in sampled.logprobs:
                output.logprobs[request_id] = [sampled.logprobs[row]]
        return output


class ModelRunner(ABC):
    """Owns the request slots and sampling state of one rank; the KV cache is given."""

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        backend: ModelBackend,
        kv_caches: list[torch.Tensor],
        device: torch.device,
        connector: KVConnectorWorker | None = None,
    ) -> None:
        self._config = config
        scheduler, self._block_size = config.scheduler, config.cache.block_size
        self._model, self._backend, self._kv_caches = model, backend, kv_caches
        self._device = device
        self._connector = connector or KVConnectorWorker()
        self._connector.register_kv_caches(kv_caches)
        self.slots = RequestSlots(
            scheduler.max_num_seqs,
            scheduler.max_model_len,
            self._block_size,
            device,
            len(config.cache.group_windows),
        )
        self._sampling = SamplingState(scheduler.max_num_seqs, config.model.vocab_size, device)
        num_slots = kv_caches[0].shape[0] * self._block_size
        self._scorer = PromptScorer(
            model, num_slots, config.model.hidden_size, TORCH_DTYPES[config.model.dtype]
        )
        self._residents: dict[str, _Resident] = {}
        self._rows: StepRows | None = None
        """Of the last step, while nobody comes, leaves or fails."""
        self._num_computed = np.zeros(scheduler.max_num_seqs, dtype=np.int64)
        """By slot: upper bound after all launched steps."""
        self._setup()

    @abstractmethod
    def _setup(self) -> None:
        """What the device needs beside that."""

    @abstractmethod
    def _prepare(self, rows: StepRows) -> ForwardBatch:
        """The tensors of a step, and num_computed_tokens advanced."""

    def _forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states (T, hidden_size) and logits (S, vocab_size)."""
        hidden = self._hidden(batch.input_ids, batch.common)
        return hidden, self._model.compute_logits(hidden[batch.logits_indices])

    def _hidden(self, input_ids: torch.Tensor, common: CommonAttentionMetadata) -> torch.Tensor:
        metadata = self._backend.build_metadata(common)
        return self._model.forward(input_ids, common, self._kv_caches, metadata)

    @abstractmethod
    def _sample(
        self, batch: ForwardBatch, logits: torch.Tensor, sampled_slots: list[int]
    ) -> PendingSample:
        """Choose a token a row, and append it to its request slot on the device."""

    @abstractmethod
    def _mark(self) -> torch.cuda.Event | None:
        """The end of what was queued so far."""

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Queue one step.

        A request that cannot be admitted ends alone, with an error in the result. Any other
        exception is that of all requests of the step; those of later plans are not affected.
        """
        step = LaunchedStep(plan.step_id)
        # Residents first, with all that is new: later plans count on them even if this step fails.
        for request_id in plan.removed_request_ids:
            self._residents.pop(request_id, None)
        for new in plan.new_requests:
            prompt, params = new.engine_request.prompt_token_ids, new.engine_request.sampling_params
            self._residents[new.request_id] = _Resident(
                len(prompt), params.prompt_logprobs, max(1, new.score_start)
            )
        if plan.removed_request_ids or plan.new_requests:
            self._rows = None
        try:
            for slot in self.slots.update(plan):
                self._sampling.remove(slot)
            self._admit(plan, step)
            self._run(plan, step)
            step.done = self._mark()
        except Exception:
            self._rows = None
            for request_id in plan.num_scheduled_tokens:
                self._residents[request_id].failed = True
            raise
        return step

    def _admit(self, plan: SchedulerOutput, step: LaunchedStep) -> None:
        for new in plan.new_requests:
            try:
                slot = self.slots.slot_of[new.request_id]
                self._num_computed[slot] = new.num_computed_tokens
                self._sampling.add(slot, new.engine_request)
            except Exception as error:
                logger.exception("%s cannot be admitted", new.request_id)
                self._residents[new.request_id].failed = True
                step.errors[new.request_id] = f"{type(error).__name__}: {error}"

    def _run(self, plan: SchedulerOutput, step: LaunchedStep) -> None:
        """Forward pass, scores and samples of all requests that have not failed before."""
        if self._rows is None or not self._rows.serves(plan):
            self._rows = self._rows_of(plan)
        rows = self._rows
        if not rows.names:
            return
        self._num_computed[rows.slots] += rows.query_lens
        batch = self._prepare(rows)
        self._connector.start_load_kv(plan.kv_connector_metadata)
        hidden, logits = self._forward(batch)
        self._connector.save_kv(plan.kv_connector_metadata)
        if rows.scored:
            # Hidden states are kept with the blocks of the first group.
            slot_mapping = batch.common.slot_mapping.reshape(-1, len(hidden))[0]
            self._score_prompts(rows, slot_mapping, hidden, step)
        if rows.sampled_ids:
            step.request_ids = rows.sampled_ids
            step.sampled = self._sample(batch, logits, rows.sampled_slots)

    def _rows_of(self, plan: SchedulerOutput) -> StepRows:
        names = [name for name in plan.num_scheduled_tokens if not self._residents[name].failed]
        query_lens = [plan.num_scheduled_tokens[name] for name in names]
        slots = [self.slots.slot_of[name] for name in names]
        sampled_rows = [row for row, name in enumerate(names) if name in plan.sampling_requests]
        ends = accumulate(query_lens)
        return StepRows(
            plan=plan,
            names=names,
            slots=np.array(slots, dtype=np.int64),
            query_lens=np.array(query_lens, dtype=np.int64),
            sampled_rows=np.array(sampled_rows, dtype=np.int64),
            sampled_ids=[names[row] for row in sampled_rows],
            sampled_slots=[slots[row] for row in sampled_rows],
            scored=[
                (name, end - query_len, end)
                for name, query_len, end in zip(names, query_lens, ends, strict=True)
                if self._residents[name].num_top is not None
            ],
        )

    def _score_prompts(
        self, rows: StepRows, slot_mapping: torch.Tensor, hidden: torch.Tensor, step: LaunchedStep
    ) -> None:
        """Scores that this step makes possible, for the requests that ask for them."""
        for name, start, end in rows.scored:
            resident = self._residents[name]
            self._scorer.keep(hidden[start:end], slot_mapping[start:end])
            slot, first, num_top = self.slots.slot_of[name], resident.next_score, resident.num_top
            stop = min(int(self._num_computed[slot]) + 1, resident.num_prompt_tokens)
            if num_top is None or first >= stop:
                continue
            resident.next_score = stop
            try:
                step.prompt_logprobs[name] = self._score(slot, range(first, stop), num_top)
            except FloatingPointError as error:
                step.errors[name] = str(error)

    def _score(self, slot: int, positions: range, num_top: int) -> list[TokenLogprobs]:
        targets = torch.arange(positions.start, positions.stop, device=self._device)
        sources = targets - 1
        blocks = self.slots.block_tables[0, slot, sources // self._block_size].to(torch.int64)
        kv_slots = blocks * self._block_size + sources % self._block_size
        next_tokens = self.slots.token_ids[slot, targets].to(torch.int64)
        return self._scorer.score(kv_slots, next_tokens, num_top)
