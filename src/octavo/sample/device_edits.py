"""Logits processors on the device: an fp32 copy of the rows that use any, edited without waiting.

Which rows use what is known on the host and is gathered once for a set of request slots, so a step
that repeats the last one's slots uploads nothing, and a feature is one edit for all rows that use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.kernels.triton.sampling_penalties import penalize
from octavo.sample.processors import NO_TOKEN
from octavo.sample.state import BadWords, Column, Feature, SamplingState, to_device


@dataclass(frozen=True, slots=True)
class _Entries:
    """Single logits of work rows; each (n,) int64 on the device."""

    rows: Tensor
    slots: Tensor
    """The rows' request slots."""
    tokens: Tensor


@dataclass(slots=True)
class Edits:
    """What is done to which rows. Work row i is the copy of logits row `touched[i]`."""

    work_rows: Tensor
    """(rows,) int32: the work row of each logits row, -1 for those that are read as they are."""
    touched: Tensor
    """(work rows,) int64."""
    bias: tuple[_Entries, Tensor] | None = None
    """With the value of each entry, fp32."""
    penalized: tuple[Tensor, Tensor] | None = None
    """Work rows and their slots, int64."""
    allowed: tuple[_Entries, Tensor] | None = None
    """With the work rows, int64."""
    bad_words: tuple[_Entries, Tensor] | None = None
    """The last token of each word, with the tokens before it: (words, longest) int64."""
    end_tokens: _Entries | None = None

    @classmethod
    def of(cls, slots: list[int], features: np.ndarray, state: SamplingState) -> Edits | None:
        """Those of some rows, given by slot and Feature bits; None if no row uses a processor."""
        touched = np.flatnonzero(features & Feature.processors())
        if not len(touched):
            return None
        device = state.device
        places = [(work_row, slots[row]) for work_row, row in enumerate(touched)]

        def using(wanted: Feature) -> list[tuple[int, int]]:
            return [place for place in places if state.features[place[1]] & wanted]

        work_rows = np.full(len(slots), -1)
        work_rows[touched] = np.arange(len(touched))
        bias, allowed = using(Feature.BIAS), using(Feature.ALLOWED)
        penalized = using(Feature.REPETITION | Feature.OUTPUT_PENALTY)
        bad, ending = using(Feature.BAD_WORDS), using(Feature.MIN_TOKENS)
        edits = cls(
            work_rows=to_device(work_rows, torch.int32, device),
            touched=to_device(touched, torch.int64, device),
        )
        if bias:
            values = torch.cat([state.bias[slot][1] for _, slot in bias])
            edits.bias = _entries(bias, [state.bias[slot][0] for _, slot in bias]), values
        if penalized:
            rows, penalized_slots = to_device(penalized, torch.int64, device).T.contiguous()
            edits.penalized = rows, penalized_slots
        if allowed:
            rows = to_device([row for row, _ in allowed], torch.int64, device)
            edits.allowed = _entries(allowed, [state.allowed[slot] for _, slot in allowed]), rows
        if bad:
            words = [state.bad_words[slot] for _, slot in bad]
            edits.bad_words = _entries(bad, [word.last for word in words]), _joined(words)
        if ending:
            edits.end_tokens = _entries(ending, [state.end_ids[slot] for _, slot in ending])
        return edits

    def apply(
        self,
        logits: Tensor,
        table: Tensor,
        history: Tensor,
        num_tokens: Tensor,
        num_prompt_tokens: Tensor,
    ) -> Tensor:
        """The work rows, (work rows, vocab) fp32, in the order of step 2 of Sampler.sample.

        logits: (rows, vocab), kept as they are; table: settings by slot; history: (max_num_seqs,
        max_len) int32; num_tokens, num_prompt_tokens: (max_num_seqs,) int32.
        """
        work = logits.index_select(0, self.touched).float()
        if self.bias:
            entries, values = self.bias
            at = entries.rows, entries.tokens
            work.index_put_(at, work[at] + values)
        if self.penalized:
            penalize(work, *self.penalized, table, history, num_tokens, num_prompt_tokens)
        if self.allowed:
            entries, rows = self.allowed
            at = entries.rows, entries.tokens
            kept = work[at]
            work.index_fill_(0, rows, -torch.inf)
            work.index_put_(at, kept)
        if self.bad_words:
            _mask_bad_words(work, *self.bad_words, history, num_tokens)
        if self.end_tokens:
            entries = self.end_tokens
            at, slots = (entries.rows, entries.tokens), entries.slots
            num_output_tokens = num_tokens[slots] - num_prompt_tokens[slots]
            too_short = num_output_tokens < table[slots, Column.MIN_TOKENS]
            work.index_put_(at, work[at].masked_fill_(too_short, -torch.inf))
        return work


def _entries(places: list[tuple[int, int]], tokens: list[Tensor]) -> _Entries:
    """Work row and slot of each of some rows, with the row's tokens."""
    repeated = np.repeat(np.array(places).T, [len(ids) for ids in tokens], axis=1)
    ids = torch.cat(tokens)
    rows, slots = to_device(repeated, torch.int64, ids.device)
    return _Entries(rows, slots, ids)


def _joined(words: list[BadWords]) -> Tensor:
    """The prefixes of all words, (words, longest) int64, right-aligned."""
    longest = max(word.prefixes.shape[1] for word in words)
    return torch.cat(
        [pad(w.prefixes, (longest - w.prefixes.shape[1], 0), value=NO_TOKEN) for w in words]
    )


def _mask_bad_words(
    work: Tensor, entries: _Entries, prefixes: Tensor, history: Tensor, num_tokens: Tensor
) -> None:
    """As processors.mask_bad_words, each word in its own row."""
    length, vocab = prefixes.shape[1], work.shape[1]
    ends = num_tokens[entries.slots, None]
    columns = ends + torch.arange(-length, 0, device=work.device)
    recent = history[entries.slots[:, None], columns.clamp(min=0)]
    recent = recent.masked_fill_(columns < 0, NO_TOKEN)
    hit = ((prefixes == recent) | (prefixes == NO_TOKEN)).all(1)
    values = torch.full_like(hit, torch.inf, dtype=work.dtype).masked_fill_(hit, -torch.inf)
    # Two words may end in the same token with only one of them hit: the smaller value wins.
    places = entries.rows * vocab + entries.tokens
    work.view(-1).scatter_reduce_(0, places, values, reduce="amin")
