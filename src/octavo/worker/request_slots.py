"""Request slots: the device's own copy of every running request's state, in rows that never move.

All integer state lives in one int32 arena; a step's changes are runs of values staged in one host
buffer and applied by one scatter, so a plan costs one launch whatever it contains. Sampled tokens
are written by the device itself and never pass through the host before the next step reads them.
"""

from __future__ import annotations

from itertools import accumulate, chain

import numpy as np
import torch

from octavo.core.scheduler_output import NewRequestData, SchedulerOutput
from octavo.errors import ConfigError
from octavo.kernels.triton.step_inputs import write_segments
from octavo.worker.pinned import PinnedRing

MAX_ARENA = 2**31 - 1
FIRST_STAGING = 1 << 16  # int32s; grows with the prompts


class RequestSlots:
    """State of up to `max_num_seqs` requests; attributes are views into the arena.

    token_ids: (max_num_seqs, max_model_len) int32, prompt and output so far.
    block_tables: (num_groups, max_num_seqs, max_blocks) int32, one row a KV group and request, padded
    with the null block 0; what a window has passed may be any block.
    num_tokens, num_computed_tokens, num_prompt_tokens: (max_num_seqs,) int32.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        self.max_blocks = -(-max_model_len // block_size)
        widths = [max_model_len, 1, 1, 1, *[self.max_blocks] * num_groups]
        sizes = [max_num_seqs * width for width in widths]
        if sum(sizes) > MAX_ARENA:
            raise ConfigError(
                f"max_num_seqs={max_num_seqs} times max_model_len={max_model_len} is more than the "
                f"{MAX_ARENA} entries that request slots can have"
            )
        self._starts = [0, *np.cumsum(sizes).tolist()]
        self._widths = widths
        self.arena = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        views = self.arena.split_with_sizes(sizes)
        self.token_ids = views[0].view(max_num_seqs, max_model_len)
        self.num_tokens, self.num_computed_tokens, self.num_prompt_tokens = views[1:4]
        self.num_groups = num_groups
        tables = self.arena[self._starts[4] :]
        self.block_tables = tables.view(num_groups, max_num_seqs, self.max_blocks)
        self._staging = PinnedRing(device, FIRST_STAGING)
        self.slot_of: dict[str, int] = {}
        self._num_blocks_of: dict[str, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def update(self, plan: SchedulerOutput) -> list[int]:
        """Free, admit and extend rows as the plan says. Returns the slots that were freed.

        Rows are booked before anything is written, so a later failure of the step leaves the
        bookkeeping right for the next plan.
        """
        freed = []
        for request_id in plan.removed_request_ids:
            slot = self.slot_of.pop(request_id, None)
            if slot is not None:
                del self._num_blocks_of[request_id]
                self._free.append(slot)
                freed.append(slot)
        for new in plan.new_requests:
            self.slot_of[new.request_id] = self._free.pop()
            self._num_blocks_of[new.request_id] = 0
        writes = [write for new in plan.new_requests for write in self._admission(new)]
        for request_id, block_ids in plan.new_block_ids.items():
            writes += self._append_blocks(request_id, block_ids)
        self._apply(writes)
        return freed

    def _append_blocks(self, request_id: str, block_ids: list[int]) -> list[tuple[int, list[int]]]:
        """block_ids: as many of each group, group after group."""
        slot, start = self.slot_of[request_id], self._num_blocks_of[request_id]
        each = len(block_ids) // self.num_groups
        self._num_blocks_of[request_id] = start + each
        return [
            (self._index(4 + group, slot) + start, block_ids[group * each : (group + 1) * each])
            for group in range(self.num_groups)
        ]

    def warm_up(self) -> None:
        """Compile what `update` launches on a GPU. Writes into the arena."""
        self._apply([(0, [0])])

    def _index(self, field: int, slot: int) -> int:
        return int(self._starts[field]) + slot * self._widths[field]

    def _admission(self, new: NewRequestData) -> list[tuple[int, list[int]]]:
        slot = self.slot_of[new.request_id]
        return [
            (self._index(0, slot), new.token_ids),
            (self._index(1, slot), [len(new.token_ids)]),
            (self._index(2, slot), [new.num_computed_tokens]),
            (self._index(3, slot), [len(new.engine_request.prompt_token_ids)]),
            *self._append_blocks(new.request_id, new.block_ids),
        ]

    def _apply(self, writes: list[tuple[int, list[int]]]) -> None:
        if not writes:
            return
        targets = np.array([start for start, _ in writes], dtype=np.int32)
        lengths = [len(values) for _, values in writes]
        offsets = np.array([0, *accumulate(lengths)], dtype=np.int32)
        values = np.array([*chain.from_iterable(values for _, values in writes)], dtype=np.int32)
        if self.arena.is_cuda:
            staged = self._staging.stage([targets, offsets, values])
            write_segments(self.arena, staged, len(writes))
            self._staging.release()
            return
        index = np.repeat(targets - offsets[:-1], lengths) + np.arange(len(values))
        self.arena.index_copy_(0, torch.from_numpy(index), torch.from_numpy(values))
