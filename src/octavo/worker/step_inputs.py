"""The GPU's input tensors of a step: at fixed addresses, so that CUDA graphs can read them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from octavo.attention.base import CommonAttentionMetadata
from octavo.kernels.triton.step_inputs import bind_prepare_step
from octavo.worker.pinned import PinnedRing
from octavo.worker.request_slots import RequestSlots


class StepInputs:
    """Filled by one kernel from the request slots and a few numbers that the host stages."""

    def __init__(
        self, slots: RequestSlots, max_num_tokens: int, block_size: int, device: torch.device
    ) -> None:
        self._slots, self._block_size = slots, block_size
        num_groups, max_num_seqs, max_blocks = slots.block_tables.shape
        self._staging = PinnedRing(device, 3 * max_num_seqs + 1)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids = zeros(max_num_tokens)
        self._positions = zeros(max_num_tokens, dtype=torch.int64)
        self._slot_mapping = zeros(num_groups, max_num_tokens, dtype=torch.int64)
        self._seq_lens = zeros(max_num_seqs)
        self._query_start_loc = zeros(max_num_seqs + 1)
        self._block_tables = zeros(num_groups, max_num_seqs, max_blocks)
        self.logits_indices = zeros(max_num_seqs, dtype=torch.int64)
        self.sample_slots = zeros(max_num_seqs)
        per_token = self.input_ids, self._positions, self._slot_mapping
        per_request = self._seq_lens, self._query_start_loc, self._block_tables
        self._outputs = *per_token, *per_request, self.logits_indices, self.sample_slots
        self._staging.stage([])
        self.fill_again: Callable[[], None]
        """Queue it for the next step of the same requests with the same numbers of tokens."""

    def fill(
        self,
        slots: np.ndarray,
        query_lens: np.ndarray,
        sampled_rows: np.ndarray,
        padded: tuple[int, int],
    ) -> None:
        """Queue the kernel that makes the inputs and advances num_computed_tokens.

        slots, query_lens: (R,) integers; sampled_rows: which of the R get a token; padded: requests and
        tokens, padding included.
        """
        assert padded[0] <= len(self.sample_slots)
        assert padded[1] <= len(self.input_ids)
        self._staging.release()  # the steps so far are the last to read what they share
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        sampled = np.full(len(slots), -1, dtype=np.int32)
        sampled[sampled_rows] = np.arange(len(sampled_rows))
        self.fill_again = bind_prepare_step(
            self._staging.stage([slots.astype(np.int32), starts, sampled]),
            (self._slots.token_ids, self._slots.block_tables, self._slots.num_computed_tokens),
            self._outputs,
            (len(slots), int(starts[-1]), len(sampled_rows)),
            padded,
            self._block_size,
        )
        self.fill_again()

    def common(self, num_requests: int, num_tokens: int) -> CommonAttentionMetadata:
        """Views of the inputs for a step of this size, padding included."""
        return CommonAttentionMetadata(
            query_start_loc=self._query_start_loc[: num_requests + 1],
            seq_lens=self._seq_lens[:num_requests],
            block_tables=self._block_tables[:, :num_requests].squeeze(0),
            slot_mapping=self._slot_mapping[:, :num_tokens].squeeze(0),
            positions=self._positions[:num_tokens],
        )
