"""Root-mean-square normalisation, with the residual addition that precedes it."""

from __future__ import annotations

import torch
from torch import nn

from octavo.kernels.triton.norm import reference_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight. Statistics in fp32; the result is rounded before the weight, as in HF."""

    def __init__(
        self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        empty = torch.empty(hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: (rows, hidden_size). Returns (normalised x + residual, x + residual).

        Without a residual x itself is normalised and becomes the residual. On a GPU the sum is
        written into `residual`.
        """
        norm = rms_norm if x.is_cuda else reference_rms_norm
        return norm(x, self.weight, self.eps, residual)
