"""One step on one rank: plan -> slots -> ForwardBatch -> hidden states -> logits -> sampled tokens.

`launch` only queues device work and returns; `LaunchedStep.collect` waits for it and makes plain data.
Nothing that the next launch needs passes through `collect`: sampled tokens are written into the
request slots on the device. What differs between devices is in `cpu_runner` and `gpu_runner`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

import torch

from octavo.attention.groups import ModelBackend
from octavo.config.engine import EngineConfig
from octavo.core.request import EngineRequest
from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.kv_transfer.connector import KVConnectorWorker, NullWorkerConnector
from octavo.logging import get_logger
from octavo.models.decoder import TORCH_DTYPES, DecoderModel
from octavo.outputs import TokenLogprobs
from octavo.sample.sampler import CollectedSample
from octavo.sample.state import SamplingState
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.prompt_scores import PromptScorer
from octavo.worker.request_slots import RequestSlots

logger = get_logger(__name__)


class PendingSample(Protocol):
    """Tokens that the device is still choosing."""

    def collect(self) -> CollectedSample:
        """The tokens, once the step is done."""
        ...


class Done(Protocol):
    """The end of a step's work on the device: a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait for it. May be called again after an interrupt."""
        ...


@dataclass(slots=True)
class _Resident:
    """What the host remembers of a request in a slot."""

    engine_request: EngineRequest
    num_computed_tokens: int
    """Upper bound after all launched steps."""
    next_score: int
    """First prompt position whose score is owed."""
    failed: bool = False
    """Its row may not be what the plans say, so it runs no more: it only waits to be removed."""

    @property
    def num_top(self) -> int | None:
        return self.engine_request.sampling_params.prompt_logprobs

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.engine_request.prompt_token_ids)


@dataclass(slots=True)
class LaunchedStep:
    """A step whose device work is queued."""

    step_id: int
    request_ids: list[str] = field(default_factory=list)
    """Requests of the sampled rows, in row order."""
    sampled: PendingSample | None = None
    done: Done | None = None
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
        self._connector = connector or NullWorkerConnector()
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
        self._setup()

    @abstractmethod
    def _setup(self) -> None:
        """What the device needs beside that."""

    @abstractmethod
    def _prepare(
        self,
        slots: list[int],
        query_lens: list[int],
        seq_lens: list[int],
        sampled_rows: list[int],
        sampled_ids: list[str],
    ) -> ForwardBatch:
        """The tensors of a step, and num_computed_tokens advanced.

        slots, query_lens, seq_lens (upper bounds): one a request; sampled_rows: which of them get a
        token; sampled_ids: their names.
        """

    @abstractmethod
    def _forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states (T, hidden_size) and logits (S, vocab_size)."""

    @abstractmethod
    def _sample(self, batch: ForwardBatch, logits: torch.Tensor) -> PendingSample:
        """Choose a token a row, and append it to its request slot on the device."""

    @abstractmethod
    def _mark(self) -> Done | None:
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
            self._residents[new.request_id] = _Resident(
                new.engine_request, new.num_computed_tokens, max(1, new.score_start)
            )
        try:
            for slot in self.slots.update(plan):
                self._sampling.remove(slot)
            self._admit(plan, step)
            self._run(plan, step)
            step.done = self._mark()
        except Exception:
            for request_id in plan.num_scheduled_tokens:
                self._residents[request_id].failed = True
            raise
        return step

    def _admit(self, plan: SchedulerOutput, step: LaunchedStep) -> None:
        for new in plan.new_requests:
            try:
                self._sampling.add(self.slots.slot_of[new.request_id], new.engine_request)
            except Exception as error:
                logger.exception("%s cannot be admitted", new.request_id)
                self._residents[new.request_id].failed = True
                step.errors[new.request_id] = f"{type(error).__name__}: {error}"

    def _run(self, plan: SchedulerOutput, step: LaunchedStep) -> None:
        """Forward pass, scores and samples of all requests that have not failed before."""
        scheduled = {
            request_id: num_tokens
            for request_id, num_tokens in plan.num_scheduled_tokens.items()
            if not self._residents[request_id].failed
        }
        if not scheduled:
            return
        seq_lens = []
        for request_id, query_len in scheduled.items():
            resident = self._residents[request_id]
            resident.num_computed_tokens += query_len
            seq_lens.append(resident.num_computed_tokens)
        names = list(scheduled)
        sampled_rows = [row for row, name in enumerate(names) if name in plan.sampling_requests]
        batch = self._prepare(
            [self.slots.slot_of[name] for name in names],
            list(scheduled.values()),
            seq_lens,
            sampled_rows,
            [names[row] for row in sampled_rows],
        )
        self._connector.start_load_kv(plan.kv_connector_metadata)
        hidden, logits = self._forward(batch)
        self._connector.save_kv(plan.kv_connector_metadata)
        # Hidden states are kept with the blocks of the first group.
        slot_mapping = batch.common.slot_mapping.reshape(-1, len(hidden))[0]
        self._score_prompts(scheduled, slot_mapping, hidden, step)
        if batch.sampled_ids:
            step.request_ids = batch.sampled_ids
            step.sampled = self._sample(batch, logits)

    def _score_prompts(
        self,
        scheduled: dict[str, int],
        slot_mapping: torch.Tensor,
        hidden: torch.Tensor,
        step: LaunchedStep,
    ) -> None:
        """Scores that this step makes possible, for the requests that ask for them."""
        start = 0
        for request_id, query_len in scheduled.items():
            end = start + query_len
            resident = self._residents[request_id]
            if resident.num_top is not None:
                self._scorer.keep(hidden[start:end], slot_mapping[start:end])
                if positions := self._positions_to_score(resident):
                    try:
                        scores = self._score(request_id, positions, resident.num_top)
                        step.prompt_logprobs[request_id] = scores
                    except FloatingPointError as error:
                        step.errors[request_id] = str(error)
            start = end

    def _positions_to_score(self, resident: _Resident) -> range:
        end = min(resident.num_computed_tokens + 1, resident.num_prompt_tokens)
        positions = range(resident.next_score, end)
        resident.next_score = max(resident.next_score, end)
        return positions

    def _score(self, request_id: str, positions: range, num_top: int) -> list[TokenLogprobs]:
        slot = self.slots.slot_of[request_id]
        targets = torch.arange(positions.start, positions.stop, device=self._device)
        sources = targets - 1
        blocks = self.slots.block_tables[0, slot, sources // self._block_size].to(torch.int64)
        kv_slots = blocks * self._block_size + sources % self._block_size
        next_tokens = self.slots.token_ids[slot, targets].to(torch.int64)
        return self._scorer.score(kv_slots, next_tokens, num_top)
