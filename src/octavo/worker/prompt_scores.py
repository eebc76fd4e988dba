"""Scores of prompt tokens (prompt_logprobs), also for positions that came from the prefix cache.

The final hidden states of requests that ask for scores are kept beside the KV cache, addressed by the
same slots, so a cached prefix can be scored without running it again. The core lets such a request hit
only blocks whose hidden states were kept. The store exists from the first such request on.
"""

from __future__ import annotations

import torch

from octavo.models.decoder import DecoderModel
from octavo.outputs import TokenLogprobs
from octavo.sample.logprobs import prompt_logprobs

ROWS_AT_ONCE = 128  # bounds the logits held at a time: 128 x 152k x 4 bytes = 78 MB


class PromptScorer:
    """Keeps hidden states by KV slot and turns them into scores."""

    def __init__(self, model: DecoderModel, num_slots: int, hidden_size: int, dtype: torch.dtype):
        self._model = model
        self._shape = (num_slots, hidden_size)
        self._dtype = dtype
        self._hidden: torch.Tensor | None = None

    def keep(self, hidden: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store hidden (T, hidden_size) at KV slots (T,)."""
        if self._hidden is None:
            self._hidden = torch.empty(self._shape, dtype=self._dtype, device=hidden.device)
        self._hidden[slot_mapping] = hidden

    def score(
        self, kv_slots: torch.Tensor, next_tokens: torch.Tensor, num_top: int
    ) -> list[TokenLogprobs]:
        """Scores of next_tokens (P,), predicted from the states kept at kv_slots (P,)."""
        assert self._hidden is not None, "scores asked before any hidden state was kept"
        scores: list[TokenLogprobs] = []
        for start in range(0, len(kv_slots), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            logits = self._model.compute_logits(self._hidden[kv_slots[part]])
            scores += prompt_logprobs(logits, next_tokens[part], num_top)
        return scores
