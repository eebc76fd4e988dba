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
from octavo.sample import processors
from octavo.sample.draw import Cuts, draw_cut, gumbel_argmax
from octavo.sample.logprobs import first_max, score
from octavo.sample.processors import NO_TOKEN
from octavo.sample.random import row_keys
from octavo.sample.state import Column, Feature, SamplingState

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
    """(rows,) int64 on the device; -1 for rows in `errors`."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Rows whose request asked, errors excepted."""
    errors: dict[int, str] = field(default_factory=dict)
    """Rows that have no token, and why; the others are unaffected."""

    def collect(self) -> CollectedSample:
        """The same as plain data."""
        return CollectedSample(self.token_ids.tolist(), self.errors, self.logprobs)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is known of the rows besides their logits."""

    slots: Sequence[int]
    index: Tensor
    """(rows,) int64 on the device: the same slots."""
    features: np.ndarray
    """(rows,) int64, Feature bits."""
    numbers: Tensor
    """(rows, columns) float64 on the device: the state's table."""
    num_tokens: Tensor
    num_prompt_tokens: Tensor

    def having(self, wanted: Feature) -> Tensor:
        """Rows, int64 on the device, with any of the wanted features."""
        found = torch.from_numpy(np.flatnonzero(self.features & wanted))
        return found.to(self.numbers.device)

    def column(self, column: Column) -> Tensor:
        """(rows,) fp32 on the device."""
        return self.numbers[:, column].float()


class Sampler:
    """Samples one token a row. Keeps nothing between calls."""

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
        index = torch.tensor(slots, dtype=torch.int64, device=logits.device)
        features = state.features[np.asarray(slots, dtype=np.int64)]
        rows = _Rows(slots, index, features, state.table[index], num_tokens, num_prompt_tokens)

        scored = rows.having(Feature.LOGPROBS)
        raw_logits = logits.index_select(0, scored)
        token_ids, row_max = first_max(logits)
        raw_max = row_max.tolist()
        touched = rows.having(Feature.processors())
        if len(touched):
            _process(logits, rows, state, history)
            token_ids[touched], row_max[touched] = first_max(_take(logits, touched))
        errors = _errors(raw_max, row_max.tolist())
        if errors:
            failed = list(errors)
            token_ids[failed] = NO_TOKEN
            features[failed] = 0
        step = max(1, _DRAW_ELEMENTS // logits.shape[1])
        for group in (rows.having(Feature.RANDOM), rows.having(Feature.RANDOM_CUT)):
            for start in range(0, len(group), step):
                part = group[start : start + step]
                token_ids[part] = _draw(_take(logits, part), row_max[part], rows, part)
        return SamplerOutput(
            token_ids, _scores(scored, raw_logits, token_ids, rows, state, errors), errors
        )


def _process(logits: Tensor, rows: _Rows, state: SamplingState, history: Tensor) -> None:
    """Step 2, in place."""
    slots = rows.slots
    for row in rows.having(Feature.BIAS).tolist():
        processors.add_bias(logits[row], *state.bias[slots[row]])
    penalized = rows.having(Feature.REPETITION | Feature.OUTPUT_PENALTY)
    if len(penalized):
        _penalize(logits, rows, penalized, history)
    for row in rows.having(Feature.ALLOWED).tolist():
        processors.keep_only(logits[row], state.allowed[slots[row]])
    for row in rows.having(Feature.BAD_WORDS).tolist():
        words = state.bad_words[slots[row]]
        recent = processors.last_tokens(
            history[slots[row]], rows.num_tokens[row], words.prefixes.shape[1]
        )
        processors.mask_bad_words(logits[row], words.prefixes, words.last, recent)
    for row in rows.having(Feature.MIN_TOKENS).tolist():
        num_output_tokens = rows.num_tokens[row] - rows.num_prompt_tokens[row]
        too_short = num_output_tokens < rows.numbers[row, Column.MIN_TOKENS]
        processors.mask_tokens(logits[row], state.end_ids[slots[row]], too_short)


def _penalize(logits: Tensor, rows: _Rows, penalized: Tensor, history: Tensor) -> None:
    end = rows.num_tokens[penalized]
    start = torch.zeros_like(end)
    history = history[:, : int(end.max())].index_select(0, rows.index[penalized])
    row, token = processors.occurrences(history, start, end)
    processors.penalize_repetition(logits, penalized[row], token, rows.column(Column.REPETITION))
    row, token = processors.occurrences(history, rows.num_prompt_tokens[penalized], end)
    processors.penalize_output(
        logits,
        penalized[row],
        token,
        rows.column(Column.PRESENCE),
        rows.column(Column.FREQUENCY),
    )


def _errors(raw_max: list[float], row_max: list[float]) -> dict[int, str]:
    errors: dict[int, str] = {}
    for row, (raw, final) in enumerate(zip(raw_max, row_max, strict=True)):
        if math.isnan(raw) or raw == math.inf:
            errors[row] = "the model's logits contain NaN or infinity"
        elif final == -math.inf:
            errors[row] = "no token may be sampled: every one is masked"
        elif not math.isfinite(final):
            errors[row] = "logits are out of range after bias and penalties"
    return errors


def _draw(logits: Tensor, row_max: Tensor, rows: _Rows, part: Tensor) -> Tensor:
    """Steps 3 to 5 for random rows. logits: the rows `part`, overwritten; returns their tokens."""
    numbers = rows.numbers[part]
    # The shift comes first: dividing can then overflow only to -inf, however small the temperature.
    temperature = numbers[:, Column.TEMPERATURE, None].float()
    distance = logits.sub_(row_max[:, None]).div_(temperature)
    request_keys = numbers[:, [Column.KEY_FIRST, Column.KEY_SECOND]].long()
    keys = row_keys(request_keys, rows.num_tokens[part])
    if not rows.features[int(part[0])] & Feature.RANDOM_CUT:
        return gumbel_argmax(distance, keys)
    cuts = Cuts(
        log_min_p=numbers[:, Column.LOG_MIN_P].float(),
        top_k=numbers[:, Column.TOP_K].long(),
        top_p=numbers[:, Column.TOP_P],
    )
    return draw_cut(distance, keys, cuts)


def _take(logits: Tensor, rows: Tensor) -> Tensor:
    """These rows: a view if they are all, else a copy."""
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _scores(
    scored: Tensor,
    raw_logits: Tensor,
    token_ids: Tensor,
    rows: _Rows,
    state: SamplingState,
    errors: dict[int, str],
) -> dict[int, TokenLogprobs]:
    """Step 6. raw_logits: those of the rows `scored`."""
    names = scored.tolist()
    alive = [i for i, row in enumerate(names) if row not in errors]
    names = [names[i] for i in alive]
    if not names:
        return {}
    if errors:
        raw_logits = raw_logits[alive]
    top = [state.logprobs[rows.slots[row]] for row in names]
    return dict(zip(names, score(raw_logits, token_ids[names], top), strict=True))
