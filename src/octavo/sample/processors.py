"""Penalties on repeated tokens in torch: those of the CPU sampler, and the oracle of the GPU's."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.sample.state import Column


def penalize(
    work: Tensor,
    work_rows: Tensor,
    places: Tensor,
    table: Tensor,
    history: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
) -> None:
    """Penalise rows of work, (n, vocab) fp32, in place.

    work_rows, places: (rows,) int64, where each row is in work and in all that follows: table,
    settings in float64; history: (m, max_len) int32; num_tokens, num_prompt_tokens: (m,) ints.
    Logits of tokens that occur are divided by the repetition penalty where positive and multiplied
    elsewhere; those of tokens of the output lose frequency for each occurrence, and presence once.
    """
    vocab, settings = work.shape[1], table[places].float()
    end, prompt_end = num_tokens[places, None], num_prompt_tokens[places, None]
    known = history[:, : int(end.max())].index_select(0, places)
    columns = torch.arange(known.shape[1], device=work.device)
    row, column = (columns < end).nonzero(as_tuple=True)
    place, scale = (work_rows[row], known[row, column].long()), settings[row, Column.REPETITION]
    values = work[place]
    work[place] = torch.where(values > 0, values / scale, values * scale)  # repeats write the same

    row, column = ((columns >= prompt_end) & (columns < end)).nonzero(as_tuple=True)
    pairs, counts = torch.unique(row * vocab + known[row, column], return_counts=True)
    row, token = pairs // vocab, pairs % vocab
    frequency, presence = settings[row, Column.FREQUENCY], settings[row, Column.PRESENCE]
    work[work_rows[row], token] -= frequency * counts
    work[work_rows[row], token] -= presence
