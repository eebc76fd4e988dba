"""Logits processors on the device: an fp32 copy of the rows that use any, edited without waiting.

Which rows use what is known on the host and is gathered once for a set of request slots, so a step
that repeats the last one's slots uploads nothing. One operation edits all rows that use a feature;
only bad words, whose patterns differ in length, go row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.triton.sampling_penalties import penalize
from octavo.sample import processors
from octavo.sample.state import BadWords, Column, Feature, SamplingState, to_device


@dataclass(frozen=True, slots=True)
class _Entries:
    """Single logits of work rows; each (n,) int64 on the device."""

    rows: Tensor
    slots: Tensor
    """The rows' request slots."""
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Edits:
    """What is done to which rows. Work row i is the copy of logits row `touched[i]`."""

    work_rows: Tensor
    """(rows,) int32: the work row of each logits row, -1 for those that are read as they are."""
    touched: Tensor
    """(work rows,) int64."""
    bias: tuple[_Entries, Tensor] | None
    """With the value of each entry, fp32."""
    penalized: tuple[Tensor, Tensor] | None
    """Work rows and their slots, int64."""
    allowed: tuple[_Entries, Tensor] | None
    """With the work rows, int64."""
    bad_words: list[tuple[int, int, BadWords]]
    """Work row, slot, words."""
    end_tokens: _Entries | None

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
        ending = using(Feature.MIN_TOKENS)
        values = [state.bias[slot][1] for _, slot in bias]
        return cls(
            work_rows=to_device(work_rows, torch.int32, device),
            touched=to_device(touched, torch.int64, device),
            bias=(_entries(bias, [state.bias[slot][0] for _, slot in bias]), torch.cat(values))
            if bias
            else None,
            penalized=_columns(using(Feature.REPETITION | Feature.OUTPUT_PENALTY), device),
            allowed=(
                _entries(allowed, [state.allowed[slot] for _, slot in allowed]),
                to_device([row for row, _ in allowed], torch.int64, device),
            )
            if allowed
            else None,
            bad_words=[(*place, state.bad_words[place[1]]) for place in using(Feature.BAD_WORDS)],
            end_tokens=_entries(ending, [state.end_ids[slot] for _, slot in ending])
            if ending
            else None,
        )

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
        for row, slot, words in self.bad_words:
            length = words.prefixes.shape[1]
            recent = processors.last_tokens(history[slot], num_tokens[slot], length)
            processors.mask_bad_words(work[row], words.prefixes, words.last, recent)
        if self.end_tokens:
            entries = self.end_tokens
            at, slots = (entries.rows, entries.tokens), entries.slots
            num_output_tokens = num_tokens[slots] - num_prompt_tokens[slots]
            too_short = num_output_tokens < table[slots, Column.MIN_TOKENS]
            work.index_put_(at, work[at].masked_fill_(too_short, -torch.inf))
        return work


def _columns(places: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor] | None:
    if not places:
        return None
    rows, slots = to_device(places, torch.int64, device).T.contiguous()
    return rows, slots


def _entries(places: list[tuple[int, int]], tokens: list[Tensor]) -> _Entries:
    repeated = np.repeat(np.array(places).T, [len(ids) for ids in tokens], axis=1)
    ids = torch.cat(tokens)
    rows, slots = to_device(repeated, torch.int64, ids.device)
    return _Entries(rows, slots, ids)
