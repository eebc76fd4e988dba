"""Inputs of a step, made on the GPU from the request slots by two kernels.

Both read what the host staged in pinned memory directly, so that no copy stands between two steps.
The torch twin is `worker.forward_batch.build_common_metadata`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import Launcher

BLOCK = 1024


@triton.jit(do_not_specialize=["num_segments"])
def _write_segments(arena, staged, num_segments, BLOCK: tl.constexpr):
    # staged: targets[num_segments], offsets[num_segments + 1], values
    segment = tl.program_id(0)
    target = tl.load(staged + segment).to(tl.int64)
    begin = tl.load(staged + num_segments + segment)
    end = tl.load(staged + num_segments + segment + 1)
    values = staged + 2 * num_segments + 1
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < end
        tl.store(arena + target + index - begin, tl.load(values + index, mask=inside), mask=inside)


_launch_write = Launcher(_write_segments, BLOCK=BLOCK, num_warps=4)


def write_segments(arena: Tensor, staged: Tensor, num_segments: int) -> None:
    """Scatter runs of values into `arena` (int32).

    staged: int32, readable from the GPU: num_segments targets in the arena, num_segments + 1 offsets
    into the values, then the values.
    """
    _launch_write((num_segments,), arena, staged, num_segments)


_COUNTS = ["num_requests", "num_tokens", "num_sampled", "padded_requests", "padded_tokens"]


@triton.jit(do_not_specialize=_COUNTS)
def _prepare(
    staged, token_ids, block_table, num_computed_tokens, input_ids, positions, slot_mapping,
    seq_lens, query_start_loc, block_tables, logits_indices, sample_slots, num_requests, num_tokens,
    num_sampled, padded_requests, padded_tokens, max_model_len, max_blocks, max_num_seqs, max_tokens,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # staged: slots[num_requests], starts[num_requests + 1], sampled row or -1 [num_requests]
    request = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if request < num_requests:
        slot = tl.load(staged + request)
        begin = tl.load(staged + num_requests + request)
        end = tl.load(staged + num_requests + request + 1)
        sampled = tl.load(staged + 2 * num_requests + 1 + request)
        computed = tl.load(num_computed_tokens + slot)
        seq_len = computed + end - begin
        history = token_ids + slot.to(tl.int64) * max_model_len
        for start in range(begin, end, BLOCK):
            token = start + lanes
            inside = token < end
            position = computed + token - begin
            tl.store(input_ids + token, tl.load(history + position, mask=inside), mask=inside)
            tl.store(positions + token, position.to(tl.int64), mask=inside)
        for group in range(GROUPS):
            table = block_table + (group * max_num_seqs + slot).to(tl.int64) * max_blocks
            out = block_tables + (group * max_num_seqs + request).to(tl.int64) * max_blocks
            mapping = slot_mapping + group * max_tokens
            for start in range(begin, end, BLOCK):
                token = start + lanes
                inside = token < end
                position = computed + token - begin
                block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                tl.store(mapping + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
            for start in range(0, tl.cdiv(seq_len, BLOCK_SIZE), BLOCK):
                column = start + lanes
                inside = column < tl.cdiv(seq_len, BLOCK_SIZE)
                tl.store(out + column, tl.load(table + column, mask=inside), mask=inside)
        tl.store(seq_lens + request, seq_len)
        tl.store(query_start_loc + request + 1, end)
        tl.store(num_computed_tokens + slot, seq_len)
        if sampled >= 0:
            tl.store(logits_indices + sampled, (end - 1).to(tl.int64))
            tl.store(sample_slots + sampled, slot)
    elif request < padded_requests:
        tl.store(seq_lens + request, 0)
        tl.store(query_start_loc + request + 1, num_tokens)
    else:  # the last program pads tokens and sampled rows
        tl.store(query_start_loc, 0)
        for start in range(num_tokens, padded_tokens, BLOCK):
            token = start + lanes
            inside = token < padded_tokens
            tl.store(input_ids + token, 0, mask=inside)
            tl.store(positions + token, tl.zeros((BLOCK,), tl.int64), mask=inside)
            for group in range(GROUPS):
                mapping = slot_mapping + group * max_tokens
                tl.store(mapping + token, tl.full((BLOCK,), -1, tl.int64), mask=inside)
        for start in range(num_sampled, padded_requests, BLOCK):
            row = start + lanes
            tl.store(logits_indices + row, tl.zeros((BLOCK,), tl.int64), mask=row < padded_requests)


def bind_prepare_step(
    staged: Tensor, slots: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, ...],
    counts: tuple[int, int, int], padded: tuple[int, int], block_size: int,
) -> Callable[[], None]:  # fmt: skip
    """A call that fills the step's input tensors and advances num_computed_tokens.

    staged: int32, readable from the GPU: for R requests their slots (R), first tokens (R + 1), and
    rows among the sampled ones or -1 (R). slots: token_ids (max_num_seqs, max_model_len),
    block_tables (groups, max_num_seqs, max_blocks) and num_computed_tokens, int32. outputs, at least
    as long as `padded` says: input_ids int32, positions int64 (tokens), slot_mapping int64 (groups,
    tokens); seq_lens (requests), query_start_loc (requests + 1), block_tables (groups, max_num_seqs,
    max_blocks) int32; logits_indices int64 and sample_slots int32 (requests). counts: requests, tokens,
    sampled rows; padded: requests and tokens with padding, which is empty requests and tokens of id 0,
    position 0 and slot -1.
    """
    groups, max_num_seqs, max_blocks = slots[1].shape
    widths = slots[0].shape[1], max_blocks, max_num_seqs, outputs[2].shape[1]
    launcher = _prepare_launcher(block_size, groups)
    return launcher.bind((padded[0] + 1,), staged, *slots, *outputs, *counts, *padded, *widths)


@cache
def _prepare_launcher(block_size: int, groups: int) -> Launcher:
    return Launcher(_prepare, BLOCK_SIZE=block_size, BLOCK=BLOCK, GROUPS=groups, num_warps=4)
