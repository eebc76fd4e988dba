"""One step on one rank: plan -> slots -> ForwardBatch -> hidden states -> logits -> sampled tokens.

`launch` only queues device work and returns; `LaunchedStep.collect` waits for it and makes plain data.
Nothing that the next launch needs passes through `collect`: sampled tokens are written into the
request slots on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from octavo.attention.base import AttentionBackend
from octavo.config.engine import EngineConfig
from octavo.core.request import EngineRequest
from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo.kv_transfer.connector import KVConnectorWorker, NullWorkerConnector
from octavo.logging import get_logger
from octavo.models.decoder import TORCH_DTYPES, DecoderModel
from octavo.outputs import TokenLogprobs
from octavo.sample.sampler import Sampler, SamplerOutput
from octavo.sample.state import SamplingState
from octavo.worker.forward_batch import ForwardBatch, build_common_metadata
from octavo.worker.prompt_scores import PromptScorer
from octavo.worker.request_slots import RequestSlots

logger = get_logger(__name__)


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
    sampled: SamplerOutput | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def collect(self) -> ModelRunnerOutput:
        """Wait for the device and return plain data."""
        output = ModelRunnerOutput(
            self.step_id, prompt_logprobs=self.prompt_logprobs, errors=self.errors
        )
        if self.sampled is None:
            return output
        token_ids = self.sampled.token_ids.tolist()
        for row, request_id in enumerate(self.request_ids):
            if row in self.sampled.errors:
                output.errors[request_id] = self.sampled.errors[row]
                continue
            output.sampled_token_ids[request_id] = [token_ids[row]]
            if row in self.sampled.logprobs:
                output.logprobs[request_id] = [self.sampled.logprobs[row]]
        return output


class ModelRunner:
    """Owns the request slots and sampling state of one rank; the KV cache is given."""

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        backend: AttentionBackend,
        kv_caches: list[torch.Tensor],
        device: torch.device,
        connector: KVConnectorWorker | None = None,
    ) -> None:
        scheduler, self._block_size = config.scheduler, config.cache.block_size
        self._model, self._backend, self._kv_caches = model, backend, kv_caches
        self._device = device
        self._connector = connector or NullWorkerConnector()
        self._connector.register_kv_caches(kv_caches)
        self.slots = RequestSlots(
            scheduler.max_num_seqs, scheduler.max_model_len, self._block_size, device
        )
        self._sampling = SamplingState(scheduler.max_num_seqs, config.model.vocab_size, device)
        self._sampler = Sampler()
        num_slots = kv_caches[0].shape[0] * self._block_size
        self._scorer = PromptScorer(
            model, num_slots, config.model.hidden_size, TORCH_DTYPES[config.model.dtype]
        )
        self._residents: dict[str, _Resident] = {}

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
        batch = self._prepare(scheduled, plan.sampling_requests)
        self._connector.start_load_kv(plan.kv_connector_metadata)
        hidden = self._model.forward(
            batch.input_ids, batch.positions, self._kv_caches, batch.attention
        )
        self._connector.save_kv(plan.kv_connector_metadata)
        self.slots.num_computed_tokens.index_add_(0, batch.slots, batch.query_lens.to(torch.int32))
        self._score_prompts(scheduled, batch, hidden, step)
        step.request_ids = [batch.request_ids[row] for row in batch.sampling_rows.tolist()]
        if step.request_ids:
            step.sampled = self._sample(batch, step.request_ids, hidden)

    def _prepare(self, scheduled: dict[str, int], sampling_requests: set[str]) -> ForwardBatch:
        request_ids = list(scheduled)
        query_lens = list(scheduled.values())
        seq_lens = []
        for request_id, query_len in scheduled.items():
            resident = self._residents[request_id]
            resident.num_computed_tokens += query_len
            seq_lens.append(resident.num_computed_tokens)
        rows = torch.tensor(
            [self.slots.slot_of[request_id] for request_id in request_ids], device=self._device
        )
        common, input_ids = build_common_metadata(
            self.slots, rows, query_lens, seq_lens, self._block_size
        )
        sampling_rows = torch.tensor(
            [row for row, name in enumerate(request_ids) if name in sampling_requests],
            dtype=torch.int64,
            device=self._device,
        )
        return ForwardBatch(
            request_ids=request_ids,
            slots=rows,
            input_ids=input_ids,
            positions=common.positions,
            query_lens=torch.tensor(query_lens, device=self._device),
            logits_indices=common.query_start_loc[1:][sampling_rows].to(torch.int64) - 1,
            sampling_rows=sampling_rows,
            common=common,
            attention=self._backend.build_metadata(common),
        )

    def _sample(
        self, batch: ForwardBatch, request_ids: list[str], hidden: torch.Tensor
    ) -> SamplerOutput:
        logits = self._model.compute_logits(hidden[batch.logits_indices])
        rows = batch.slots[batch.sampling_rows]
        num_tokens = self.slots.num_tokens[rows].to(torch.int64)
        sampled = self._sampler.sample(
            logits,
            [self.slots.slot_of[request_id] for request_id in request_ids],
            self._sampling,
            self.slots.token_ids,
            num_tokens,
            self.slots.num_prompt_tokens[rows].to(torch.int64),
        )
        # A failed row has no token, but the next step may already be launched with it: any valid
        # id will do, its result is dropped.
        token_ids = sampled.token_ids.clamp(min=0).to(torch.int32)
        self.slots.token_ids[rows, num_tokens] = token_ids
        self.slots.num_tokens[rows] += 1
        return sampled

    def _score_prompts(
        self,
        scheduled: dict[str, int],
        batch: ForwardBatch,
        hidden: torch.Tensor,
        step: LaunchedStep,
    ) -> None:
        """Scores that this step makes possible, for the requests that ask for them."""
        start = 0
        for request_id, query_len in scheduled.items():
            end = start + query_len
            resident = self._residents[request_id]
            if resident.num_top is not None:
                self._scorer.keep(hidden[start:end], batch.common.slot_mapping[start:end])
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
        blocks = self.slots.block_table[slot, sources // self._block_size].to(torch.int64)
        kv_slots = blocks * self._block_size + sources % self._block_size
        next_tokens = self.slots.token_ids[slot, targets].to(torch.int64)
        return self._scorer.score(kv_slots, next_tokens, num_top)
