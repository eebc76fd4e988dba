"""Logits processors: an fp32 copy of the rows that use any, edited without waiting for a device.

Which rows use what is known on the host and is gathered once for a set of request slots, so a step
that repeats the last one's slots uploads nothing, and a feature is one edit for all rows that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.sample.state import NO_TOKEN, Column, Feature, SamplingState, to_device


class Edits:
    """What is done to which rows. Work row i is the copy of logits row `touched[i]`.

    Entries are lists of tensors: of each logit to edit the work row, the row's place in what `apply`
    is given, the token and, for some, more.
    """

    def __init__(
        self, slots: Sequence[int], features: np.ndarray, state: SamplingState, by_row: bool = False
    ) -> None:
        """For rows given by slot and Feature bits. by_row: a row's place is its work row, not its slot."""
        touched = np.flatnonzero(features & Feature.PROCESSORS)
        users = [slots[row] for row in touched.tolist()]
        work_rows = np.full(len(slots), -1)
        work_rows[touched] = np.arange(len(touched))
        self.work_rows = to_device(work_rows, torch.int32, state.device)
        """(rows,) int32: the work row of each logits row, -1 for those that are read as they are."""
        self.touched = to_device(touched, torch.int64, state.device)
        """(work rows,) int64."""

        def upload(rows: np.ndarray) -> list[Tensor]:
            return list(to_device(rows, torch.int64, state.device))

        def using(wanted: Feature) -> np.ndarray:
            rows = [row for row, slot in enumerate(users) if state.features[slot] & wanted]
            return np.array(
                [rows, rows if by_row else [users[row] for row in rows]], dtype=np.int64
            )

        def entries(wanted: Feature, of: dict[int, tuple[Tensor, ...]]) -> list[Tensor]:
            rows = using(wanted)
            parts = [of[users[row]] for row in rows[0]]
            repeated = np.repeat(rows, [len(part[0]) for part in parts], axis=1)
            columns = [torch.cat(column) for column in zip(*parts, strict=True)]
            return upload(repeated) + columns if parts else []

        self._bias = entries(Feature.BIAS, state.bias)
        penalized = using(Feature.REPETITION | Feature.OUTPUT_PENALTY)
        self._penalized = upload(penalized) if penalized.size else []
        self._allowed = entries(Feature.ALLOWED, state.allowed)
        if self._allowed:
            self._allowed += upload(using(Feature.ALLOWED)[:1])
        words = {slot: state.bad_words[slot] for slot in users if slot in state.bad_words}
        longest = max((prefixes.shape[1] for _, prefixes in words.values()), default=0)
        for slot, (last, prefixes) in words.items():
            left = longest - prefixes.shape[1]
            words[slot] = (last, pad(prefixes, (left, 0), value=NO_TOKEN))
        self._bad_words = entries(Feature.BAD_WORDS, words)
        self._end_tokens = entries(Feature.MIN_TOKENS, state.end_ids)

    def apply(
        self,
        logits: Tensor,
        table: Tensor,
        history: Tensor,
        num_tokens: Tensor,
        num_prompt_tokens: Tensor,
        penalize: Callable[..., None],
    ) -> Tensor:
        """The work rows, (work rows, vocab) fp32, in the order of step 2 of Sampler.sample.

        logits: (rows, vocab), kept as they are. By the rows' places: table: settings; history: (n,
        max_len) int32; num_tokens, num_prompt_tokens: (n,) ints. penalize: the function below, or
        what equals it.
        """
        work = logits.index_select(0, self.touched).float()
        if self._bias:
            rows, _, tokens, values = self._bias
            work[rows, tokens] += values
        if self._penalized:
            penalize(work, *self._penalized, table, history, num_tokens, num_prompt_tokens)
        if self._allowed:
            rows, _, tokens, restricted = self._allowed
            kept = work[rows, tokens]
            work.index_fill_(0, restricted, -torch.inf)
            work[rows, tokens] = kept
        if self._bad_words:
            _mask_bad_words(work, self._bad_words, history, num_tokens)
        if self._end_tokens:
            rows, places, tokens = self._end_tokens
            num_output_tokens = num_tokens[places] - num_prompt_tokens[places]
            too_short = num_output_tokens < table[places, Column.MIN_TOKENS]
            work[rows, tokens] = work[rows, tokens].masked_fill_(too_short, -torch.inf)
        return work


def _mask_bad_words(
    work: Tensor, entries: list[Tensor], history: Tensor, num_tokens: Tensor
) -> None:
    """Mask the last token of each word whose other tokens, a row of prefixes, end the history."""
    rows, places, last, prefixes = entries
    length, vocab = prefixes.shape[1], work.shape[1]
    columns = num_tokens[places, None] + torch.arange(-length, 0, device=work.device)
    recent = history[places[:, None], columns.clamp(min=0)]
    recent = recent.masked_fill_(columns < 0, NO_TOKEN)
    hit = ((prefixes == recent) | (prefixes == NO_TOKEN)).all(1)
    values = torch.full_like(hit, torch.inf, dtype=work.dtype).masked_fill_(hit, -torch.inf)
    # Two words may end in the same token with only one of them hit: the smaller value wins.
    work.view(-1).scatter_reduce_(0, rows * vocab + last, values, reduce="amin")


def penalize(
    work: Tensor,
    work_rows: Tensor,
    places: Tensor,
    table: Tensor,
    history: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
) -> None:
    """Penalise rows of work, (n, vocab) fp32, in place: the CPU sampler's, and the oracle of the GPU's.

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
