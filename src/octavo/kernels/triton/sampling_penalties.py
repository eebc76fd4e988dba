"""Repetition, presence and frequency penalties on rows of fp32 logits, from the token history.

Counts live only for the time of a step: they follow from the history, so nothing has to be kept in
order through preemption or rejected drafts. The arithmetic is that of `sample/edits.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.sampling_noise import FREQUENCY, PRESENCE, REPETITION, TABLE_WIDTH

_IN_PROMPT = tl.constexpr(1 << 30)
_SPLIT = 8  # programs that walk one history
_TILE = 1024  # tokens of it, or of the vocabulary, that a program takes at a time


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _count(
    counts, slots, history, num_tokens, num_prompt_tokens,
    VOCAB: tl.constexpr, HISTORY_LEN: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    end, prompt_end = tl.load(num_tokens + slot), tl.load(num_prompt_tokens + slot)
    counts += row.to(tl.int64) * VOCAB
    history += slot.to(tl.int64) * HISTORY_LEN
    for start in range(part * TILE, end, SPLIT * TILE):
        position = start + tl.arange(0, TILE)
        token = tl.load(history + position, mask=position < end, other=-1)
        known = (token >= 0) & (token < VOCAB)
        in_prompt = position < prompt_end
        tl.atomic_or(counts + token, _IN_PROMPT, mask=known & in_prompt, sem="relaxed")
        tl.atomic_add(counts + token, 1, mask=known & (in_prompt == 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _penalize(work, counts, work_rows, slots, table, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    count = tl.load(counts + row.to(tl.int64) * VOCAB + columns, mask=columns < VOCAB, other=0)
    occurs = count != 0
    place = work + tl.load(work_rows + row).to(tl.int64) * VOCAB + columns
    x = tl.load(place, mask=occurs, other=0.0)
    settings = table + tl.load(slots + row) * TABLE_WIDTH
    repetition = tl.load(settings + REPETITION).to(tl.float32)
    presence = tl.load(settings + PRESENCE).to(tl.float32)
    frequency = tl.load(settings + FREQUENCY).to(tl.float32)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    num_outputs = count & (_IN_PROMPT - 1)
    lowered = x - frequency * num_outputs.to(tl.float32) - presence
    tl.store(place, tl.where(num_outputs > 0, lowered, x), mask=occurs)


def penalize(
    work: Tensor, work_rows: Tensor, slots: Tensor, table: Tensor, history: Tensor,
    num_tokens: Tensor, num_prompt_tokens: Tensor,
) -> None:  # fmt: skip
    """Penalise rows of work, (n, vocab) fp32 contiguous, in place.

    work_rows, slots: (rows,) int64, where each row is in work and its request slot; table: the
    settings by slot, float64; history: (max_num_seqs, max_len) int32; num_tokens,
    num_prompt_tokens: (max_num_seqs,) int32. Tokens outside the vocabulary are passed over.
    """
    rows, vocab = len(slots), work.shape[1]
    counts = torch.zeros(rows, vocab, dtype=torch.int32, device=work.device)
    launch(
        _count, (_SPLIT, rows), counts, slots, history, num_tokens, num_prompt_tokens,
        VOCAB=vocab, HISTORY_LEN=history.shape[1], TILE=_TILE, SPLIT=_SPLIT,
    )  # fmt: skip
    launch(
        _penalize, (-(-vocab // _TILE), rows), work, counts, work_rows, slots, table,
        VOCAB=vocab, CHUNK=_TILE, enable_fp_fusion=False,
    )  # fmt: skip
