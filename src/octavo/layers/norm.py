"""Normalisation of rows: by root mean square, with the residual addition before it, and LayerNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from octavo.kernels.cpu.native import LANES, cpu_kernels
from octavo.kernels.triton.norm import rms_norm


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias. A row's bits depend on that row only."""

    def __init__(
        self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        empty = torch.empty(2, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty[0], requires_grad=False)
        self.bias = nn.Parameter(empty[1], requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, hidden_size) -> the same shape."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / rms(x) * weight. Statistics in fp32; the result is rounded before the weight, as in HF.

    unit_offset: x / rms(x) * (1 + weight), rounded after that, as in HF's Gemma.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        unit_offset: bool = False,
    ) -> None:
        super().__init__()
        empty = torch.empty(hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps, self.unit_offset = eps, unit_offset

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: (rows, hidden_size). Returns (normalised x + residual, x + residual).

        Without a residual x itself is normalised and becomes the residual. On a GPU the sum is
        written into `residual`.
        """
        if x.is_cuda:
            return rms_norm(x, self.weight, self.eps, residual, self.unit_offset)
        if x.shape[-1] % LANES == 0 and (kernels := cpu_kernels(x.dtype)):
            return kernels.rms_norm(x, self.weight, self.eps, residual, self.unit_offset)
        residual = x if residual is None else x + residual
        wide = residual.float()
        variance = wide.square().mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(variance + self.eps)
        if self.unit_offset:
            return (normed * (1.0 + self.weight.float())).to(x.dtype), residual
        return self.weight * normed.to(x.dtype), residual
