"""The model runner of the CPU: every tensor of a step is made by torch, at its exact size."""

from __future__ import annotations

import torch

from octavo.sample.sampler import Sampler, SamplerOutput
from octavo.worker.forward_batch import ForwardBatch, build_common_metadata
from octavo.worker.model_runner import ModelRunner, StepRows


class CpuModelRunner(ModelRunner):
    """See ModelRunner. `launch` runs the step; nothing is left for `collect` to wait for."""

    def _setup(self) -> None:
        self._sampler = Sampler()

    def _prepare(self, rows: StepRows) -> ForwardBatch:
        slots = torch.from_numpy(rows.slots)
        max_seq_len = int(self._num_computed[rows.slots].max())
        common, input_ids = build_common_metadata(
            self.slots, slots, rows.query_lens.tolist(), max_seq_len, self._block_size
        )
        self.slots.num_computed_tokens[slots] = common.seq_lens
        picked = torch.from_numpy(rows.sampled_rows)
        return ForwardBatch(
            num_tokens=len(input_ids),
            input_ids=input_ids,
            common=common,
            logits_indices=common.query_start_loc[1:][picked].to(torch.int64) - 1,
            sample_slots=slots[picked],
        )

    def _mark(self) -> None:
        return None

    def _sample(
        self, batch: ForwardBatch, logits: torch.Tensor, sampled_slots: list[int]
    ) -> SamplerOutput:
        rows = batch.sample_slots
        num_tokens = self.slots.num_tokens[rows].to(torch.int64)
        sampled = self._sampler.sample(
            logits,
            sampled_slots,
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
