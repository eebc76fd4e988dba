"""Turns logits into tokens: one batch, each row by its own settings, no row seeing another.

Reductions over the vocabulary are maxima, integer sums and selections with ties by token id; all
the rest is element-wise. So a row's token and score bits are the same alone and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.outputs import TokenLogprobs
from octavo.sample import filters, processors
from octavo.sample.logprobs import score
from octavo.sample.random import BLOCK, block_bounds, gumbel_noise, row_keys
from octavo.sample.state import Column, Feature, SamplingState

NO_TOKEN = processors.NO_TOKEN
_SCOUTS = 4


@dataclass(slots=True)
class SamplerOutput:
    """Result of one call. Row numbers are those of the logits."""

    token_ids: Tensor
    """(rows,) int64 on the device; -1 for rows in `errors`."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Rows whose request asked, errors excepted."""
    errors: dict[int, str] = field(default_factory=dict)
    """Rows that have no token, and why; the others are unaffected."""


class Sampler:
    """Samples one token a row."""

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
        2. Processors: logit_bias, repetition, presence and frequency penalties, then the masks
           allowed_token_ids, bad_words and min_tokens. (Bias before penalties, as in vLLM.)
        3. Rows without a finite maximum become errors; greedy rows take the arg-max, lowest id on
           ties; random rows are shifted by their maximum and divided by temperature.
        4. min_p, top_k, top_p.
        5. Gumbel arg-max with the noise of (seed, position).
        6. Scores of the chosen tokens from the raw logits.
        """
        logits = logits.float().contiguous()
        features = state.features[torch.tensor(slots, dtype=torch.int64)]
        slot_index = torch.tensor(slots, dtype=torch.int64, device=logits.device)
        token_ids, row_max = first_max(logits)
        raw_max = row_max.clone()
        scored = rows_with(features, Feature.LOGPROBS)
        raw = logits[scored.to(logits.device)] if len(scored) else logits

        if len(touched := rows_with(features, Feature.processors())):
            batch = _Batch(logits, slots, slot_index, features, num_tokens, num_prompt_tokens)
            batch.apply_processors(state, history)
            touched = touched.to(logits.device)
            token_ids[touched], row_max[touched] = first_max(logits[touched])

        errors = _errors(raw_max.tolist(), row_max.tolist())
        if errors:
            failed = torch.tensor(list(errors), device=logits.device)
            token_ids[failed] = NO_TOKEN
            features[list(errors)] = 0

        if len(random := rows_with(features, Feature.RANDOM)):
            rows = random.to(logits.device)
            token_ids[rows] = _draw_rows(
                logits if len(random) == len(slots) else logits[rows],
                row_max[rows],
                features[random],
                state.table[slot_index[rows]],
                num_tokens[rows],
            )
        output = SamplerOutput(token_ids, errors=errors)
        if len(scored):
            alive = [i for i, row in enumerate(scored.tolist()) if row not in errors]
            rows = scored[alive]
            top = [state.logprobs[slots[row]] for row in rows.tolist()]
            scores = score(raw[alive], token_ids[rows.to(logits.device)], top)
            output.logprobs = dict(zip(rows.tolist(), scores, strict=True))
        return output


def rows_with(features: Tensor, wanted: Feature) -> Tensor:
    """Rows, int64 on the host, whose features include any of the wanted ones."""
    return (features & int(wanted)).nonzero().flatten()


def first_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Column int64 and value of each row's maximum; the lowest column on ties. NaN wins."""
    value, column = logits.max(dim=1)
    return column, value


def _errors(raw_max: list[float], row_max: list[float]) -> dict[int, str]:
    errors: dict[int, str] = {}
    for row, (raw, final) in enumerate(zip(raw_max, row_max, strict=True)):
        if math.isnan(raw) or raw == math.inf:
            errors[row] = "the model's logits contain NaN or infinity"
        elif final == -math.inf:
            errors[row] = "no token may be sampled: every one is masked"
        elif not math.isfinite(final):
            errors[row] = "logits are out of range after the penalties"
    return errors


class _Batch:
    """Step 2: the rows and what their slots ask of the processors."""

    def __init__(
        self,
        logits: Tensor,
        slots: Sequence[int],
        slot_index: Tensor,
        features: Tensor,
        num_tokens: Tensor,
        num_prompt_tokens: Tensor,
    ) -> None:
        self.logits = logits
        self.slots = slots
        self.slot_index = slot_index
        self.features = features
        self.num_tokens = num_tokens
        self.num_prompt_tokens = num_prompt_tokens

    def rows(self, feature: Feature) -> list[int]:
        rows: list[int] = rows_with(self.features, feature).tolist()
        return rows

    def apply_processors(self, state: SamplingState, history: Tensor) -> None:
        for row in self.rows(Feature.BIAS):
            processors.add_bias(self.logits[row], *state.bias[self.slots[row]])
        self._penalize(state, history)
        for row in self.rows(Feature.ALLOWED):
            processors.keep_only(self.logits[row], state.allowed[self.slots[row]])
        for row in self.rows(Feature.BAD_WORDS):
            words = state.bad_words[self.slots[row]]
            column = self.num_tokens[row] + torch.arange(
                -words.prefixes.shape[1], 0, device=history.device
            )
            recent = history[self.slots[row], column.clamp(min=0)].long()
            recent = recent.masked_fill(column < 0, NO_TOKEN)
            processors.mask_bad_words(self.logits[row], words.prefixes, words.last, recent)
        for row in self.rows(Feature.MIN_TOKENS):
            num_output_tokens = self.num_tokens[row] - self.num_prompt_tokens[row]
            min_tokens = state.table[self.slots[row], Column.MIN_TOKENS]
            processors.mask_tokens(
                self.logits[row], state.end_ids[self.slots[row]], num_output_tokens < min_tokens
            )

    def _penalize(self, state: SamplingState, history: Tensor) -> None:
        selected = rows_with(self.features, Feature.REPETITION | Feature.OUTPUT_PENALTY)
        if not len(selected):
            return
        rows = selected.to(self.logits.device)
        index = self.slot_index[rows]
        numbers = state.table[index].float()
        end, prompt_end = self.num_tokens[rows], self.num_prompt_tokens[rows]
        history = history[index, : int(end.max())]
        logits = self.logits[rows]
        row, token = processors.occurrences(history, torch.zeros_like(end), end)
        processors.penalize_repetition(logits, row, token, numbers[:, Column.REPETITION])
        row, token = processors.occurrences(history, prompt_end, end)
        processors.penalize_output(
            logits, row, token, numbers[:, Column.PRESENCE], numbers[:, Column.FREQUENCY]
        )
        self.logits[rows] = logits


def _draw_rows(
    logits: Tensor, row_max: Tensor, features: Tensor, numbers: Tensor, positions: Tensor
) -> Tensor:
    """Steps 3 to 5 for random rows. Overwrites logits; numbers are rows of the state's table."""
    # The shift comes first: dividing can then overflow only to -inf, at the smallest temperature.
    temperature = numbers[:, Column.TEMPERATURE, None].float()
    distance = logits.sub_(row_max[:, None]).div_(temperature)
    if len(rows := rows_with(features, Feature.MIN_P)):
        filters.filter_min_p(distance, numbers[:, Column.LOG_MIN_P].float())
    if len(rows := rows_with(features, Feature.TOP)):
        rows = rows.to(logits.device)
        filtered = distance[rows]
        filters.filter_top(
            filtered, numbers[rows, Column.TOP_K].long(), numbers[rows, Column.TOP_P]
        )
        distance[rows] = filtered
    seed_words = numbers[:, [Column.SEED_LOW, Column.SEED_HIGH]].long()
    return gumbel_argmax(distance, row_keys(seed_words, positions))


def gumbel_argmax(distance: Tensor, keys: Tensor) -> Tensor:
    """Token ids (rows,) int64 of the largest distance + noise, the lowest id on ties.

    distance: (rows, vocab) fp32, at least one entry of each row finite; keys: (rows, 2) int64.
    A block's largest distance plus its largest noise bounds its scores (rounding is monotonic), so
    only blocks that reach the best score of a few scouted blocks are expanded: an exact search.
    """
    rows, vocab = distance.shape
    if vocab % BLOCK:
        distance = pad(distance, (0, -vocab % BLOCK), value=-torch.inf)
    distance = distance.view(rows, -1, BLOCK)
    num_blocks = distance.shape[1]
    blocks = torch.arange(num_blocks, device=distance.device)
    bounds = distance.amax(2) + block_bounds(keys[:, None], blocks)

    scouts = bounds.topk(min(_SCOUTS, num_blocks), dim=1).indices
    row = torch.arange(rows, device=distance.device).repeat_interleave(scouts.shape[1])
    block = scouts.flatten()
    scores = distance[row, block] + gumbel_noise(keys[row], block)
    reached = scores.view(rows, -1).amax(1)

    row, block = (bounds >= reached[:, None]).nonzero(as_tuple=True)
    best, lane = (distance[row, block] + gumbel_noise(keys[row], block)).max(dim=1)
    token = block * BLOCK + lane
    row_best = reached.scatter_reduce(0, row, best, reduce="amax")
    token = token.masked_fill(best != row_best[row], vocab)
    return torch.full_like(keys[:, 0], vocab).scatter_reduce(0, row, token, reduce="amin")
