"""ForwardBatch: one step, flattened over requests; its tensors are made on the device from the slots.

The host knows only upper bounds of positions while steps are in flight; everything exact (positions,
input ids, slot mapping, sequence lengths) is computed on the device. This is the torch way; the
GPU's is `worker.step_inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.attention.base import CommonAttentionMetadata
from octavo.worker.request_slots import RequestSlots


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step. T tokens of R requests; S of them get logits and a sampled token."""

    num_tokens: int
    """T."""
    input_ids: torch.Tensor
    """(T,) int32 or int64."""
    common: CommonAttentionMetadata
    logits_indices: torch.Tensor
    """(S,) int64 rows of the hidden states that are sampled."""
    sample_slots: torch.Tensor
    """(S,) int32 or int64: their request slots."""
    bucket: int | None = None
    """The CUDA graph that runs it, if any."""


def build_common_metadata(
    slots: RequestSlots,
    rows: torch.Tensor,
    query_lens: list[int],
    max_seq_len: int,
    block_size: int,
) -> tuple[CommonAttentionMetadata, torch.Tensor]:
    """Positions and cache slots of a step.

    rows: (R,) int64 request slots; query_lens: R ints; max_seq_len: an upper bound.
    Returns the metadata and the input ids (T,) int64.
    """
    device = rows.device
    lens = torch.tensor(query_lens, dtype=torch.int64, device=device)
    query_start_loc = torch.zeros(len(query_lens) + 1, dtype=torch.int64, device=device)
    torch.cumsum(lens, 0, out=query_start_loc[1:])
    computed = slots.num_computed_tokens[rows].to(torch.int64)
    request_of_token = torch.repeat_interleave(
        torch.arange(len(query_lens), device=device), lens, output_size=sum(query_lens)
    )
    offsets = torch.arange(sum(query_lens), device=device) - query_start_loc[request_of_token]
    positions = computed[request_of_token] + offsets
    row_of_token = rows[request_of_token]
    input_ids = slots.token_ids[row_of_token, positions].to(torch.int64)
    block_ids = slots.block_tables[:, row_of_token, positions // block_size].to(torch.int64)
    num_blocks = -(-max_seq_len // block_size)
    common = CommonAttentionMetadata(
        query_start_loc=query_start_loc.to(torch.int32),
        seq_lens=(computed + lens).to(torch.int32),
        block_tables=slots.block_tables[:, rows, :num_blocks].squeeze(0),
        slot_mapping=(block_ids * block_size + positions % block_size).squeeze(0),
        positions=positions,
    )
    return common, input_ids
