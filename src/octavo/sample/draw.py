"""Draws tokens from scaled rows: Gumbel arg-max under min_p, top_k and top_p, without sorting.

Rows are distances, fp32 (rows, vocab): (logit - row max) / temperature, so 0 at the most likely
token, negative elsewhere, -inf where masked. Tokens rank by distance, ties by lower token id. min_p,
top_k and top_p apply in this order, each to what the one before left, as in vLLM. Each leaves a
prefix of the ranking with at least its first token. Probabilities are exact: logprobs.mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.sample.logprobs import mass
from octavo.sample.random import BLOCK, block_arrivals, gumbel_noise, negative_log

# Blocks expanded at first. Of the 768 of real logits (SmolLM2, temperature 1) 14 decide on average.
_FIRST_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Cuts:
    """What may be drawn, by row."""

    log_min_p: Tensor
    """(rows,) fp32 <= 0; -inf where min_p is off."""
    top_k: Tensor
    """(rows,) int64 >= 1; the vocabulary size where off."""
    top_p: Tensor
    """(rows,) float64; 1 where off."""

    def __getitem__(self, rows: Tensor) -> Cuts:
        return Cuts(self.log_min_p[rows], self.top_k[rows], self.top_p[rows])


def draw_cut(distance: Tensor, keys: Tensor, cuts: Cuts) -> Tensor:
    """Gumbel arg-max, (rows,) int64, over the tokens that the cuts leave. keys: (rows, 2) int64.

    If the winner of all tokens is cut, so is every token that ranks after it: these are dropped and
    the rest is drawn again with the same noise. Expected redraws: ln(1 / probability left).
    """
    goal = mass_goal(distance, cuts)
    tokens = gumbel_argmax(distance, keys)
    rows = torch.arange(len(tokens), device=tokens.device)
    while True:
        outside = is_cut(distance, tokens[rows], cuts[rows], goal[rows]).nonzero().flatten()
        if not len(outside):
            return tokens
        rows = rows[outside]
        distance = _keep_ahead(distance.index_select(0, outside), tokens[rows])
        tokens[rows] = gumbel_argmax(distance, keys[rows])


def mass_goal(distance: Tensor, cuts: Cuts) -> Tensor:
    """Mass, (rows,) float64 >= 1, that top_p wants of what min_p and top_k left; inf where off."""
    goal = torch.full_like(cuts.top_p, torch.inf)
    by_p, by_k = cuts.top_p < 1, cuts.top_k < distance.shape[1]
    for selected, is_short in ((by_p & ~by_k, False), (by_p & by_k, True)):
        if not bool(selected.any()):
            continue
        rows = selected.nonzero().flatten()
        left, left_cuts = distance.index_select(0, rows), cuts[rows]
        share = None
        if is_short:
            width = left_cuts.top_k[:, None]
            left = left.topk(int(width.max())).values
            share = (torch.arange(left.shape[1], device=left.device) < width).float()
        if bool((left_cuts.log_min_p > -torch.inf).any()):
            likely = (left >= left_cuts.log_min_p[:, None]).float()
            share = likely if share is None else share.mul_(likely)
        goal[rows] = left_cuts.top_p * mass(left, share).double()
    return goal.clamp_(min=1.0)


def is_cut(distance: Tensor, tokens: Tensor, cuts: Cuts, goal: Tensor) -> Tensor:
    """Whether, (rows,) bool, a token of each row is cut. Rows may already lack tokens behind it."""
    vocab = distance.shape[1]
    at = distance.gather(1, tokens[:, None])
    cut = at[:, 0] < cuts.log_min_p
    by_k, by_p = bool((cuts.top_k < vocab).any()), bool(goal.isfinite().any())
    if not (by_k or by_p):
        return cut
    above = (distance - at).sign_()
    num_equal = vocab - above.abs().sum(1)
    above.clamp_(min=0)
    ties = torch.zeros_like(tokens)
    if len(rows := (num_equal > 1).nonzero().flatten()):
        columns = torch.arange(vocab, device=distance.device)
        equal = (distance[rows] == at[rows]) & (columns < tokens[rows, None])
        ties[rows] = equal.sum(1)
    if by_k:
        cut |= above.sum(1).long() + ties >= cuts.top_k
    if by_p:
        ahead = mass(distance, above) + ties * mass(at)
        cut |= ahead.double() >= goal
    return cut


def _keep_ahead(distance: Tensor, tokens: Tensor) -> Tensor:
    """The rows with only the tokens that rank ahead of the given ones not masked."""
    at = distance.gather(1, tokens[:, None])
    columns = torch.arange(distance.shape[1], device=distance.device)
    behind = (distance < at) | ((distance == at) & (columns >= tokens[:, None]))
    return distance.masked_fill(behind, -torch.inf)


def gumbel_argmax(distance: Tensor, keys: Tensor) -> Tensor:
    """Token ids (rows,) int64 of the largest distance + noise, the lowest id on ties.

    At least one entry of each row is finite; keys: (rows, 2) int64. A block's largest distance
    plus its largest noise bounds its scores (rounding is monotonic). The blocks of the highest
    bounds give a score to beat; if other bounds reach it, these are expanded too: an exact search.
    """
    num_rows, vocab = distance.shape
    if vocab % BLOCK:
        distance = pad(distance, (0, -vocab % BLOCK), value=-torch.inf)
    distance = distance.view(num_rows, -1, BLOCK)
    num_blocks = distance.shape[1]
    times, offsets = block_arrivals(keys, num_blocks)
    bounds = distance.amax(2) + negative_log(times)
    lanes = torch.arange(BLOCK, device=keys.device)
    tokens = torch.empty_like(keys[:, 0])
    rows = torch.arange(num_rows, device=keys.device)
    width = min(_FIRST_WIDTH, num_blocks)
    while len(rows):
        block = bounds.index_select(0, rows).topk(width).indices.flatten()
        row = rows.repeat_interleave(width)
        noise = gumbel_noise(keys[row], block, times[row, block], offsets[row, block])
        scores = noise.add_(distance[row, block]).view(len(rows), -1)
        best = scores.amax(1, keepdim=True)
        ids = (block[:, None] * BLOCK + lanes).view(len(rows), -1)
        tokens[rows] = ids.masked_fill_(scores != best, vocab).amin(1)
        num_reaching = (bounds.index_select(0, rows) >= best).sum(1)
        rows = rows[num_reaching > width]
        width = int(num_reaching.max())
    return tokens
