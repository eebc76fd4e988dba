"""The sampler on the GPU: queues kernels and never waits. `Sampler` (CPU) is its oracle.

The steps, settings and random numbers are those of `Sampler.sample`, and so are the tokens for the
same logits, up to the last bit of exp(). A row's token and score bits are the same in any batch:
see kernels/triton/sampling.py. What runs depends on the features of the rows, known on the host:
one kernel for greedy rows, one more for random ones, one for cuts, one for scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.triton import sampling, sampling_cut
from octavo.kernels.triton.launch import Launcher
from octavo.kernels.triton.sampling_noise import STATE
from octavo.kernels.triton.sampling_penalties import penalize
from octavo.outputs import TokenLogprobs
from octavo.sample.edits import Edits
from octavo.sample.logprobs import top_tokens
from octavo.sample.sampler import ERRORS, CollectedSample
from octavo.sample.state import NO_TOKEN, Feature, SamplingState, to_device

_LOWEST = torch.finfo(torch.float32).min
_TOP_ELEMENTS = 1 << 24  # logits searched for top tokens at a time: bounds the temporaries
RESULTS_KEPT = 4
"""Launches whose results stay readable; two steps are in flight at most."""


@dataclass(slots=True)
class DeviceSample:
    """What one launch gives. Row numbers are those of the logits."""

    results: Tensor
    """(rows, 4) int32 that the host can read once the launch has run: token (0 for rows that failed),
    error code, rank, bits of the fp32 logprob. Kernels write it to pinned memory themselves: no copy
    has to be queued."""
    scored: list[int] = field(default_factory=list)
    """Rows whose request asked for logprobs."""
    top: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)
    """Rows with the ids (rows, k) int64 and logprobs (rows, k) fp32 of their most likely tokens, on the
    host once the launch has run."""

    def collect(self) -> CollectedSample:
        """Plain data as from SamplerOutput.collect, once the launch has run."""
        tokens, codes, ranks, _ = self.results.T.tolist()
        errors = {row: ERRORS[code - 1] for row, code in enumerate(codes) if code}
        for row in errors:
            tokens[row] = NO_TOKEN
        if not self.scored:
            return CollectedSample(tokens, errors, {})
        scores = self.results[:, 3].contiguous().view(torch.float32).tolist()
        logprobs = {
            row: TokenLogprobs([tokens[row]], [scores[row]], ranks[row])
            for row in self.scored
            if row not in errors
        }
        for rows, *tensors in self.top:
            for row, ids, values in zip(rows, *(t.tolist() for t in tensors), strict=True):
                if row in logprobs:
                    logprobs[row].token_ids.extend(ids)
                    logprobs[row].logprobs.extend(values)
        return CollectedSample(tokens, errors, logprobs)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the rows ask for. Holds for the next step too if slots and settings are the same."""

    slots: list[int]
    state: SamplingState
    version: int
    features: Feature
    """Of all rows together."""
    edits: Edits | None
    scored: list[int]
    top: list[tuple[int, list[int], Tensor]]
    """How many tokens, rows, and the rows on the device, int64."""
    ready: dict[int, tuple[Tensor, Tensor, list[Callable[[], None]]]] = field(default_factory=dict)
    """By turn: logits that stay at their address, their results, and the kernels bound to both."""


class DeviceSampler:
    """Samples one token a row. Launches share scratch memory, so they belong on one stream."""

    chunk = 4096
    """Tokens that one program takes. Shows in no result."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        chunk, vocab = self.chunk, vocab_size
        self._max_num_seqs, self._vocab_size, self._device = max_num_seqs, vocab, device
        options = sampling.launch_options(chunk, vocab)
        cut_options = sampling_cut.cut_options(chunk, vocab)
        self._num_chunks = options["NUM_CHUNKS"]
        self._scan, self._draw, self._score = (
            Launcher(kernel, **options) for kernel in (sampling.scan, sampling.draw, sampling.score)
        )
        self._cut = Launcher(sampling_cut.cut, **cut_options)
        # What launches share, one after the other on a stream.
        width = int(STATE.value) + 2 * self._num_chunks
        self._scratch = torch.zeros(max_num_seqs, width, dtype=torch.int64, device=device)
        bounds = max_num_seqs, 2, cut_options["NUM_BLOCKS"]
        self._block_bounds = torch.empty(bounds, dtype=torch.float32, device=device)
        lists = max_num_seqs, cut_options["LIST_SIZE"]
        self._lists = torch.empty(lists, dtype=torch.float32, device=device)
        # Stand for the edited rows where there are none, so that one machine code serves all.
        self._no_work = torch.empty(1, 1, dtype=torch.float32, device=device)
        self._no_work_rows = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self._plan: _Plan | None = None
        pinned = device.type == "cuda"
        self._host = [
            torch.zeros(max_num_seqs, 4, dtype=torch.int32, pin_memory=pinned)
            for _ in range(RESULTS_KEPT)
        ]
        self._turn = 0

    def launch(
        self,
        logits: Tensor,
        slots_host: list[int],
        rows: Tensor,
        state: SamplingState,
        history: Tensor,
        num_tokens: Tensor,
        num_prompt_tokens: Tensor,
        write_back: bool = True,
        repeats: bool = False,
    ) -> DeviceSample:
        """Queue the sampling of one token for each row; the slots of the rows are distinct.

        logits: (rows, vocab) bf16 or fp32, kept as they are; slots_host: request slot of each row;
        rows: the same on the device, (rows,) int32 or int64; history: (max_num_seqs, max_model_len)
        int32 contiguous; num_tokens, num_prompt_tokens: (max_num_seqs,) int32 by slot, as known
        before the sampled tokens. write_back: append each token to its history, also the 0 of a
        failed row. repeats: this very logits tensor will be given again, and the other tensors stay
        where they are. The first launch with a new mix of features compiles kernels.
        """
        num_rows = len(slots_host)
        assert logits.shape == (num_rows, self._vocab_size)
        assert num_rows <= self._max_num_seqs
        plan = self._plan_of(slots_host, state)
        self._turn = (self._turn + 1) % RESULTS_KEPT
        if (ready := plan.ready.get(self._turn)) is not None and ready[0] is logits:
            for kernel in ready[2]:
                kernel()
            return DeviceSample(ready[1])
        host = self._host[self._turn]
        sample = DeviceSample(host[:num_rows], plan.scored)
        if not num_rows:
            return sample
        work, work_rows = self._no_work, self._no_work_rows
        if plan.edits:
            work = plan.edits.apply(
                logits, state.table, history, num_tokens, num_prompt_tokens, penalize
            )
            work_rows = plan.edits.work_rows
        raw, request = (logits, logits.stride(0)), (rows, state.table, self._scratch, host)
        history_len = history.shape[1] if write_back else 0
        shared = *raw, work, work_rows, *request, history, num_tokens, history_len
        grid = self._num_chunks, num_rows
        kernels = [self._scan.bind(grid, *shared)]
        if plan.features & Feature.ANY_RANDOM:
            kernels.append(self._draw.bind(grid, *shared, self._block_bounds))
        if plan.features & Feature.RANDOM_CUT:
            lists = self._block_bounds, self._lists
            kernels.append(self._cut.bind((num_rows,), *shared, *lists))
        for kernel in kernels:
            kernel()
        if repeats and not (plan.edits or plan.scored):
            plan.ready[self._turn] = logits, sample.results, kernels
        if plan.scored:
            norms = torch.zeros(num_rows, 2, dtype=torch.float32, device=self._device)
            self._score(grid, *raw, *request, norms)
            for k, members, index in plan.top:
                sample.top += self._top(logits, k, members, index, norms)
        return sample

    def _plan_of(self, slots: list[int], state: SamplingState) -> _Plan:
        plan = self._plan
        if plan and plan.version == state.version and plan.slots == slots and plan.state is state:
            return plan
        features = state.features[np.asarray(slots, dtype=np.int64)]
        scored = np.flatnonzero(features & Feature.LOGPROBS).tolist()
        members: dict[int, list[int]] = {}
        for row in scored:
            members.setdefault(state.logprobs[slots[row]], []).append(row)
        members.pop(0, None)
        wanted = Feature(int(np.bitwise_or.reduce(features, initial=0)))
        self._plan = _Plan(
            slots=list(slots),
            state=state,
            version=state.version,
            features=wanted,
            edits=Edits(slots, features, state) if wanted & Feature.PROCESSORS else None,
            scored=scored,
            top=[
                (k, group, to_device(group, torch.int64, self._device))
                for k, group in members.items()
            ],
        )
        return self._plan

    def _top(
        self, logits: Tensor, k: int, members: list[int], index: Tensor, norms: Tensor
    ) -> list[tuple[list[int], Tensor, Tensor]]:
        """The k most likely tokens of some rows, and their scores by the norms of `score`."""
        found = []
        step = max(1, _TOP_ELEMENTS // self._vocab_size)
        for start in range(0, len(members), step):
            part = index[start : start + step]
            values, ids = top_tokens(logits.index_select(0, part).float(), k)
            row_max, log_mass = norms.index_select(0, part)[:, :, None].unbind(1)
            scores = ((values - row_max) - log_mass).clamp_(min=_LOWEST)
            found.append((members[start : start + step], _copied(ids), _copied(scores)))
        return found


def _copied(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
