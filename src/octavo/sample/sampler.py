"""Turns logits into tokens: one batch, each row by its own settings, no row seeing another.

Reductions over the vocabulary are maxima, integer sums and selections with ties by token id; all
the rest is element-wise. So a row's token and score bits are the same alone and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.outputs import TokenLogprobs
from octavo.sample.draw import Cuts, draw_cut, gumbel_argmax
from octavo.sample.edits import Edits, penalize
from octavo.sample.logprobs import first_max, score
from octavo.sample.random import row_keys
from octavo.sample.state import NO_TOKEN, Column, Feature, SamplingState

ERRORS = (
    "the model's logits contain NaN or infinity",
    "no token may be sampled: every one is masked",
    "logits are out of range after bias and penalties",
)
"""Why a row has no token; the kernels' error codes count them from 1."""
_DRAW_ELEMENTS = 1 << 21  # logits of random rows drawn at a time: bounds the temporaries


class CollectedSample(NamedTuple):
    """A sampled batch as plain data. Row numbers are those of the logits."""

    token_ids: list[int]
    """Without meaning for rows in `errors`."""
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


@dataclass(slots=True)
class SamplerOutput:
    """Result of one call. Row numbers are those of the logits."""

    token_ids: Tensor
    """(rows,) int64; -1 for rows in `errors`."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Rows whose request asked, errors excepted."""
    errors: dict[int, str] = field(default_factory=dict)
    """Rows that have no token, and why; the others are unaffected."""

    def collect(self) -> CollectedSample:
        """The same as plain data."""
        return CollectedSample(self.token_ids.tolist(), self.errors, self.logprobs)


class Sampler:
    """Samples one token a row, on the CPU. Keeps nothing between calls."""

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        state: SamplingState,
        history: Tensor,
        num_tokens: Tensor,
        num_prompt_tokens: Tensor,
    ) -> SamplerOutput:
        """One token for each row; rows may share a slot (positions of one request to verify).

        logits: (rows, vocab) float, may be overwritten; slots: request slot of each row; history:
        (max_num_seqs, max_model_len) int32, tokens by slot; num_tokens: (rows,) int64, tokens
        known before the sampled one, i.e. its position; num_prompt_tokens: (rows,) int64.

        1. Raw logits of rows that want logprobs are set aside: scores are before processors.
        2. Processors: logit_bias, repetition, presence and frequency penalties (bias first, as in
           vLLM), then the masks allowed_token_ids, bad_words and min_tokens.
        3. Rows without a finite maximum become errors; greedy rows take the arg-max, lowest id on
           ties; random rows are shifted by their maximum and divided by temperature.
        4. min_p, top_k, top_p.
        5. Gumbel arg-max with the noise of (seed, position).
        6. Scores of the chosen tokens from the raw logits.
        """
        logits = logits.float().contiguous()
        index = torch.tensor(slots, dtype=torch.int64)
        features, numbers = state.features[index.numpy()], state.table[index]

        def having(wanted: Feature) -> Tensor:
            return torch.from_numpy(np.flatnonzero(features & wanted))

        scored = having(Feature.LOGPROBS)
        raw_logits = logits.index_select(0, scored)
        token_ids, row_max = first_max(logits)
        raw_max = row_max.tolist()
        if len(touched := having(Feature.PROCESSORS)):
            known = history[:, : int(num_tokens.max())].index_select(0, index[touched])
            counts = num_tokens[touched], num_prompt_tokens[touched]
            edits = Edits(slots, features, state, by_row=True)
            work = edits.apply(logits, numbers[touched], known, *counts, penalize)
            token_ids[touched], row_max[touched] = first_max(work)
            logits[touched] = work
        errors = _errors(raw_max, row_max.tolist())
        token_ids[[*errors]] = NO_TOKEN
        features[[*errors]] = 0
        step = max(1, _DRAW_ELEMENTS // logits.shape[1])
        for feature in (Feature.RANDOM, Feature.RANDOM_CUT):
            group, is_cut = having(feature), feature is Feature.RANDOM_CUT
            for start in range(0, len(group), step):
                rows = group[start : start + step]
                drawn = logits if len(rows) == len(logits) else logits.index_select(0, rows)
                given = drawn, row_max[rows], numbers[rows], num_tokens[rows]
                token_ids[rows] = _draw(*given, is_cut)
        if errors:
            alive = [i for i, row in enumerate(scored.tolist()) if row not in errors]
            scored, raw_logits = scored[alive], raw_logits[alive]
        names = scored.tolist()
        top = [state.logprobs[slots[row]] for row in names]
        scores = score(raw_logits, token_ids[scored], top)
        return SamplerOutput(token_ids, dict(zip(names, scores, strict=True)), errors)


def _errors(raw_max: list[float], row_max: list[float]) -> dict[int, str]:
    errors: dict[int, str] = {}
    for row, (raw, final) in enumerate(zip(raw_max, row_max, strict=True)):
        if math.isnan(raw) or raw == math.inf:
            errors[row] = ERRORS[0]
        elif final == -math.inf:
            errors[row] = ERRORS[1]
        elif not math.isfinite(final):
            errors[row] = ERRORS[2]
    return errors


def _draw(
    logits: Tensor, row_max: Tensor, numbers: Tensor, positions: Tensor, is_cut: bool
) -> Tensor:
    """Steps 3 to 5 for random rows; overwrites logits. numbers: their rows of the table."""
    # The shift comes first: dividing can then overflow only to -inf, however small the temperature.
    temperature = numbers[:, Column.TEMPERATURE, None].float()
    distance = logits.sub_(row_max[:, None]).div_(temperature)
    keys = row_keys(numbers[:, [Column.KEY_FIRST, Column.KEY_SECOND]].long(), positions)
    if not is_cut:
        return gumbel_argmax(distance, keys)
    cuts = Cuts(
        log_min_p=numbers[:, Column.LOG_MIN_P].float(),
        top_k=numbers[:, Column.TOP_K].long(),
        top_p=numbers[:, Column.TOP_P],
    )
    return draw_cut(distance, keys, cuts)
