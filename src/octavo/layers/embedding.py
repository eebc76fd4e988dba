"""Token embedding and lm_head, which may share one weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from octavo.config.engine import LinearBackend
from octavo.kernels.triton.embedding import embed
from octavo.layers.linear import Linear

_META = torch.device("meta")


class Embedding(nn.Module):
    """Rows of a (vocab_size, hidden_size) weight by token id, times `scale` rounded to the dtype."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        empty = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.scale = torch.tensor(scale, dtype=dtype).item()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: (T,) int32 or int64 -> (T, hidden_size)."""
        if input_ids.is_cuda:
            rows = embed(input_ids, self.weight)
        else:
            rows = F.embedding(input_ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


class LMHead(Linear):
    """Hidden states to logits; with `tied` it takes the embedding's weight when finalized."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tied: Embedding | None,
    ) -> None:
        super().__init__(hidden_size, (vocab_size,), dtype, device if tied is None else _META)
        # In a tuple, so that the embedding is not registered as a child of this module.
        self._tied = (tied,)
        if tied is not None:
            self.weight = None  # The meta tensor took no memory.

    def finalize(self, backend: LinearBackend) -> None:
        """Pack the weight. A tied one stays with the embedding too, which looks up its rows."""
        (tied,) = self._tied
        if self.weight is None and tied is not None:
            self.weight = tied.weight
        super().finalize(backend)
