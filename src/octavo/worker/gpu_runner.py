"""The model runner of a GPU: inputs made on the device, CUDA graphs, results written to the host."""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.request import EngineRequest
from octavo.models.decoder import TORCH_DTYPES
from octavo.sample.device_sampler import RESULTS_KEPT, DeviceSample, DeviceSampler
from octavo.sampling_params import SamplingParams
from octavo.worker.cuda_graphs import CudaGraphs, bucket_sizes
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.model_runner import ModelRunner, StepRows
from octavo.worker.step_inputs import StepInputs


class GpuModelRunner(ModelRunner):
    """See ModelRunner. All work goes to the stream that is current at construction."""

    def _setup(self) -> None:
        config = self._config
        scheduler, model = config.scheduler, config.model
        self._max_num_seqs = scheduler.max_num_seqs
        self._inputs = StepInputs(
            self.slots, scheduler.max_num_batched_tokens, self._block_size, self._device
        )
        self._sampler = DeviceSampler(scheduler.max_num_seqs, model.vocab_size, self._device)
        self._graphs: CudaGraphs | None = None
        self._last_rows: StepRows | None = None
        self._last_batch: ForwardBatch
        self._last_result: tuple[torch.Tensor, torch.Tensor] | None = None
        """Hidden states and logits of a step like the last one, where a CUDA graph leaves them."""
        self._ends = [torch.cuda.Event() for _ in range(RESULTS_KEPT)]  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream()
        with torch.inference_mode():
            if not config.enforce_eager:
                self._graphs = self._capture()
            self._warm_up()

    def _capture(self) -> CudaGraphs:
        config = self._config
        sizes = bucket_sizes(config.scheduler.max_num_batched_tokens)
        rows = min(sizes[-1], self._max_num_seqs)
        self._logits = self._empty_logits(rows)
        self._fill_nothing(rows, sizes[-1])
        return CudaGraphs(self._forward_bucket, sizes)

    def _fill_nothing(self, num_requests: int, num_tokens: int) -> None:
        """A step of padding only."""
        nothing = np.empty(0, dtype=np.int64)
        self._inputs.fill(nothing, nothing, nothing, (num_requests, num_tokens))

    def _empty_logits(self, rows: int) -> torch.Tensor:
        model = self._config.model
        dtype = TORCH_DTYPES[model.dtype]
        return torch.zeros(rows, model.vocab_size, dtype=dtype, device=self._device)

    def _warm_up(self) -> None:
        """Compile what neither graphs nor the memory profile did: each way of sampling."""
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(logprobs=1),
            SamplingParams(repetition_penalty=1.1),
            SamplingParams(top_p=0.9, top_k=10, min_p=0.01),
        ):
            self._sampling.add(0, EngineRequest("warm-up", [0], params, seed=0))
            self._launch(self._empty_logits(1), [0], self._inputs.sample_slots[:1].zero_())
            self._sampling.remove(0)
        if self._graphs is None:
            for size in (1, 32, 96):  # one of each tile of the small products
                num_tokens = min(size, self._config.scheduler.max_num_batched_tokens)
                self._logits = self._empty_logits(min(num_tokens, self._max_num_seqs))
                self._fill_nothing(len(self._logits), num_tokens)
                self._forward_bucket(num_tokens)
        self.slots.warm_up()
        self.slots.arena.zero_()  # sampled tokens were written there

    def _prepare(self, rows: StepRows) -> ForwardBatch:
        # Decoding, a step is mostly like the last one: nothing is staged or made anew for it.
        if rows is self._last_rows:
            self._inputs.fill_again()
            return self._last_batch
        num_tokens, num_requests = int(rows.query_lens.sum()), len(rows.slots)
        padded, bucket = (num_requests, num_tokens), None
        if self._graphs is not None and (bucket := self._graphs.bucket(num_tokens)) is not None:
            padded = (min(bucket, self._max_num_seqs), bucket)
        self._last_rows = None  # until its inputs are made, should that fail
        self._inputs.fill(rows.slots, rows.query_lens, rows.sampled_rows, padded)
        num_sampled = len(rows.sampled_rows)
        self._last_rows, self._last_result = rows, None
        self._last_batch = ForwardBatch(
            num_tokens=num_tokens,
            bucket=bucket,
            input_ids=self._inputs.input_ids[:num_tokens],
            common=self._inputs.common(num_requests, num_tokens),
            logits_indices=self._inputs.logits_indices[:num_sampled],
            sample_slots=self._inputs.sample_slots[:num_sampled],
        )
        return self._last_batch

    def _forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self._graphs is not None and batch.bucket is not None:
            hidden = self._graphs.replay(batch.bucket)
            if self._last_result is None:
                num_sampled = len(batch.sample_slots)
                self._last_result = hidden[: batch.num_tokens], self._logits[:num_sampled]
            return self._last_result
        return super()._forward(batch)

    def _forward_bucket(self, num_tokens: int) -> torch.Tensor:
        """A padded step from the inputs to the logits, at fixed addresses. Returns hidden states."""
        num_requests = min(num_tokens, self._max_num_seqs)
        common = self._inputs.common(num_requests, num_tokens)
        hidden = self._hidden(self._inputs.input_ids[:num_tokens], common)
        picked = hidden[self._inputs.logits_indices[:num_requests]]
        self._model.compute_logits(picked, out=self._logits[:num_requests])
        return hidden

    def _sample(
        self, batch: ForwardBatch, logits: torch.Tensor, sampled_slots: list[int]
    ) -> DeviceSample:
        repeats = batch.bucket is not None
        return self._launch(logits, sampled_slots, batch.sample_slots, repeats)

    def _launch(
        self, logits: torch.Tensor, sampled: list[int], rows: torch.Tensor, repeats: bool = False
    ) -> DeviceSample:
        slots, settings = self.slots, self._sampling
        known = slots.token_ids, slots.num_tokens, slots.num_prompt_tokens
        return self._sampler.launch(logits, sampled, rows, settings, *known, repeats=repeats)

    def _mark(self) -> torch.cuda.Event:
        done = self._ends.pop(0)
        self._ends.append(done)  # in use again when its step has long been collected
        done.record(self._stream)  # looking up the current one takes as long as the rest of it
        return done
