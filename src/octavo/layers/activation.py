"""Gated activations of the MLP."""

from __future__ import annotations

import torch

from octavo.kernels.triton import activation


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (rows, 2 * size), gate then up -> (rows, size) = silu(gate) * up, computed in fp32.

    Not F.silu: torch's CPU kernel uses another exp for the last few elements of a buffer, so bits
    would depend on where a row lies. torch.exp does not.
    """
    if x.is_cuda:
        return activation.silu_and_mul(x)
    gate, up = x.float().chunk(2, dim=-1)
    silu = gate / torch.exp(-gate).add_(1.0)
    return silu.mul_(up).to(x.dtype)
