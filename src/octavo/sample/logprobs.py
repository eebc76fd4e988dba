"""Log probabilities, ranks and top tokens of raw logits, with bits that no batch mate can change.

Sums over the vocabulary are taken over fixed-point integers: integer addition is associative, so
the order and the split that a reduction chooses (it depends on the shape) cannot show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.outputs import TokenLogprobs
from octavo.sample.random import BLOCK

# 2**19 tokens of weight 2**44 still fit in 63 bits; the cut-off tail is under 2**-44 a token.
_ONE = 2.0**44
_LOWEST = torch.finfo(torch.float32).min
# Logits worked on at a time: temporaries stay in the L2 cache and are not faulted in page by page.
_PASS_ELEMENTS = 1 << 18


def rows_per_pass(vocab: int) -> int:
    """Rows of this many logits that passes over the whole vocabulary take at a time."""
    return max(1, _PASS_ELEMENTS // vocab)


def mass(distance: Tensor, share: Tensor | None = None) -> Tensor:
    """Sum of exp(distance) * share over each row, (rows,) int64, in units of 2**-44.

    distance: (rows, n) fp32 <= 0, -inf where masked; share: (rows, n) fp32, 0 or 1. Every term is
    rounded down to whole units.
    """
    sums = []
    step = rows_per_pass(distance.shape[1])
    for start in range(0, distance.shape[0], step):
        # exp(-40) is under one unit; deeper, exp() is 20 to 150 times slower (inf, denormals).
        terms = distance[start : start + step].clamp(min=-40.0).exp_().mul_(_ONE)
        if share is not None:
            terms.mul_(share[start : start + step])
        sums.append(terms.long().sum(1))
    return torch.cat(sums)


def first_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Column int64 and value fp32 of each row's maximum, the lowest column on ties. NaN wins.

    logits: (rows, vocab) fp32, contiguous.
    """
    rows, vocab = logits.shape
    if vocab % BLOCK:
        value, column = logits.max(dim=1)
        return column, value
    # By blocks: arg-max reductions are four times slower than plain maxima.
    blocks = logits.view(rows, vocab // BLOCK, BLOCK)
    value, block = blocks.amax(2).max(dim=1)
    lane = blocks[torch.arange(rows, device=logits.device), block].max(dim=1).indices
    return block * BLOCK + lane, value


def ordered_keys(values: Tensor) -> Tensor:
    """Distinct int64 keys that sort fp32 values (rows, n): larger value first, then lower column."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 makes the two zeros equal
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    columns = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return (bits << 32) + columns


def top_tokens(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, sorted; equal values by lower token id.

    values: (rows, vocab) fp32 without NaN; 1 <= k <= vocab. Returns values (rows, k) fp32 and token
    ids (rows, k) int64. The first k' columns do not depend on k.
    """
    rows, vocab = values.shape
    num_blocks = vocab // BLOCK
    if vocab % BLOCK == 0 and 2 * k <= num_blocks:
        # The k first block maxima come before every token of the other blocks, so only the k
        # blocks that hold them are searched; in rising order, which keeps columns ordered by id.
        blocked = values.view(rows, num_blocks, BLOCK)
        blocks = ordered_keys(blocked.amax(2)).topk(k, sorted=False).values & 0xFFFFFFFF
        blocks = (num_blocks - 1 - blocks).sort().values
        row = torch.arange(rows, device=values.device)[:, None]
        found, columns = _top_columns(blocked[row, blocks].view(rows, k * BLOCK), k)
        return found, blocks.gather(1, columns // BLOCK) * BLOCK + columns % BLOCK
    return _top_columns(values, k)


def _top_columns(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    keys = ordered_keys(values).topk(k).values
    columns = values.shape[1] - 1 - (keys & 0xFFFFFFFF)
    return values.gather(1, columns), columns


def score(logits: Tensor, token_ids: Tensor, top: list[int]) -> list[TokenLogprobs]:
    """Scores of one token per row and of the row's most likely tokens.

    logits: (rows, vocab) fp32, each row's maximum finite; token_ids: (rows,) int64; top: how many
    of the most likely tokens to add per row, -1 for the whole vocabulary.
    """
    vocab = logits.shape[1]
    counts = [vocab if k < 0 else min(k, vocab) for k in top]
    results: list[TokenLogprobs] = []
    step = rows_per_pass(vocab)
    for start in range(0, logits.shape[0], step):
        end = start + step
        results += _score_pass(logits[start:end], token_ids[start:end], counts[start:end])
    return results


def _score_pass(logits: Tensor, token_ids: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    row_max = logits.amax(1, keepdim=True)
    log_total = mass(logits - row_max).double().mul_(1.0 / _ONE).log_().float()[:, None]

    def finish(values: Tensor, max_: Tensor, log_: Tensor) -> list[list[float]]:
        rows: list[list[float]] = ((values - max_) - log_).clamp_(min=_LOWEST).tolist()
        return rows

    chosen = logits.gather(1, token_ids[:, None])
    # Comparisons to bool are several times slower than arithmetic. The clamp keeps -inf - -inf out.
    above = (logits - chosen.clamp(min=_LOWEST)).sign_().clamp_(min=0).sum(1)
    ranks = above.add_(1).long().tolist()
    chosen_scores = finish(chosen, row_max, log_total)
    ids: list[list[int]] = token_ids[:, None].tolist()
    for k in set(counts) - {0}:
        members = [row for row, count in enumerate(counts) if count == k]
        index = torch.tensor(members, device=logits.device)
        values, top_ids = top_tokens(logits.index_select(0, index), k)
        for row, row_scores, row_ids in zip(
            members, finish(values, row_max[index], log_total[index]), top_ids.tolist(), strict=True
        ):
            chosen_scores[row] += row_scores
            ids[row] += row_ids
    return [TokenLogprobs(*entry) for entry in zip(ids, chosen_scores, ranks, strict=True)]


def prompt_logprobs(logits: Tensor, target_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """Scores of given next tokens: the same bits that a sampled token gets.

    logits: (positions, vocab) float, the row at position i predicts token i + 1; target_ids:
    (positions,) int64, those next tokens; k: top tokens to add, -1 for all. Raises
    FloatingPointError if a row has NaN, +inf or nothing finite.
    """
    logits = logits.float()
    if not bool(logits.amax(1).isfinite().all()):
        raise FloatingPointError("logits of a prompt position are not finite")
    return score(logits, target_ids, [k] * logits.shape[0])
