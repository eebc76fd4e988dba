"""Logits processors: functions that change fp32 logits in place, each row at its own position.

They know tensors only: which row uses what is the sampler's business. Occurrences are pairs
(row, token id), one a token of a row's history, in any order and with repeats.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1
"""Fills bad-word prefixes on the left, and the history before its first token."""


def occurrences(history: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (row, token id), int64 each, of history[row, start[row]:end[row]].

    history: (rows, max_len) int32; start, end: (rows,) int64.
    """
    columns = torch.arange(history.shape[1], device=history.device)
    inside = (columns >= start[:, None]) & (columns < end[:, None])
    row, column = inside.nonzero(as_tuple=True)
    return row, history[row, column].long()


def last_tokens(history: Tensor, end: Tensor, length: int) -> Tensor:
    """The `length` tokens before `end`, int64, NO_TOKEN before the start.

    history: (max_len,) int32; end: () int64.
    """
    columns = end + torch.arange(-length, 0, device=history.device)
    return history[columns.clamp(min=0)].long().masked_fill_(columns < 0, NO_TOKEN)


def penalize_repetition(logits: Tensor, row: Tensor, token: Tensor, penalty: Tensor) -> None:
    """Divide positive and multiply negative logits of the tokens that occur in prompt or output.

    logits: (rows, vocab) fp32; penalty: (rows,) fp32 > 0. Repeats write the same value.
    """
    values = logits[row, token]
    scale = penalty[row]
    logits[row, token] = torch.where(values > 0, values / scale, values * scale)


def penalize_output(
    logits: Tensor, row: Tensor, token: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Subtract frequency per occurrence and presence once, for tokens that occur in the output.

    logits: (rows, vocab) fp32; presence, frequency: (rows,) fp32.
    """
    vocab = logits.shape[1]
    pairs, counts = torch.unique(row * vocab + token, return_counts=True)
    row, token = pairs // vocab, pairs % vocab
    logits[row, token] = logits[row, token] - frequency[row] * counts - presence[row]


def add_bias(logits: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add values to the logits of distinct token ids. logits: (vocab,) fp32; both others: (n,)."""
    logits[token_ids] += values


def keep_only(logits: Tensor, token_ids: Tensor) -> None:
    """Mask all but these token ids. logits: (vocab,) fp32; token_ids: (n,) int64."""
    kept = logits[token_ids]
    logits.fill_(-torch.inf)
    logits[token_ids] = kept


def mask_tokens(logits: Tensor, token_ids: Tensor, active: Tensor) -> None:
    """Mask these token ids if active. logits: (vocab,) fp32; token_ids: (n,); active: () bool."""
    logits[token_ids] = logits[token_ids].masked_fill(active, -torch.inf)


def mask_bad_words(logits: Tensor, prefixes: Tensor, last: Tensor, recent: Tensor) -> None:
    """Mask the last token of each word whose other tokens end the history.

    logits: (vocab,) fp32; prefixes: (words, length) int64, right-aligned, NO_TOKEN on the left;
    last: (words,) int64; recent: (length,) int64, the end of the history, NO_TOKEN before its start.
    """
    hit = ((prefixes == recent) | (prefixes == NO_TOKEN)).all(1)
    # Two words may end in the same token with only one of them hit: the smaller value wins.
    logits.scatter_reduce_(
        0, last, torch.where(hit, -torch.inf, torch.inf).to(logits.dtype), reduce="amin"
    )
