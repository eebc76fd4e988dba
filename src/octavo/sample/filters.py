"""min_p, top_k and top_p: which tokens of a scaled row may still be drawn.

They act on distances, fp32 (rows, vocab): (logit - row max) / temperature, so 0 at the most likely
token, negative elsewhere, -inf where masked. Applied in the order min_p, top_k, top_p, each on what
the one before left, as in vLLM; the most likely token always stays. Ties go to the lower token id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.sample.logprobs import top_tokens, weights

_FIRST_WIDTH = 64


def filter_min_p(distance: Tensor, log_min_p: Tensor) -> None:
    """Mask, in place, tokens less likely than min_p times the most likely one.

    log_min_p: (rows,) fp32 <= 0, -inf where off.
    """
    distance.masked_fill_(distance < log_min_p[:, None], -torch.inf)


def filter_top(distance: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Keep, in place, the top_k most likely tokens, then the smallest set that reaches top_p.

    top_k: (rows,) int64 >= 1, the vocabulary size or more where off; top_p: (rows,) float64, 1
    where off. Probabilities are exact fixed-point integers (see logprobs.weights), normalised over
    what top_k left.
    """
    vocab = distance.shape[1]
    top_k = top_k.clamp(max=vocab)
    by_p = top_p < 1.0
    by_k = top_k < vocab
    total = torch.zeros_like(top_k)
    if (whole := by_p & ~by_k).any():
        total[whole] = weights(distance[whole]).sum(1)
    width = min(vocab, _FIRST_WIDTH)
    while True:
        values, ids = top_tokens(distance, width)
        weight = weights(values)
        column = torch.arange(width, device=distance.device)
        kept = column < top_k[:, None]
        weight.masked_fill_(~kept, 0)
        before = weight.cumsum(1) - weight
        reached = before[:, -1] + weight[:, -1]
        goal = top_p * torch.where(by_k, reached, total).double()
        enough = torch.where(by_k, top_k <= width, reached >= goal) | (width == vocab)
        if bool(enough.all()):
            break
        width = min(vocab, width * 8)
    kept &= (before < goal[:, None]) | ~by_p[:, None] | (column == 0)
    distance.fill_(-torch.inf).scatter_(1, ids, values.masked_fill_(~kept, -torch.inf))
