"""Gated activations of the MLP."""

from __future__ import annotations

import torch

from octavo.kernels.triton import activation


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (rows, 2 * size), gate then up -> (rows, size) = silu(gate) * up, computed in fp32."""
    return activation.silu_and_mul(x) if x.is_cuda else activation.reference_silu_and_mul(x)
