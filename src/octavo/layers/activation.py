"""Activations of the MLP, gated and plain."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from octavo.kernels.triton import activation


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> x times the normal distribution function of x, by erf, computed in fp32."""
    if x.is_cuda:
        return F.gelu(x)
    wide = x.float()  # not F.gelu: it may use another erf for the last few elements of a buffer
    return torch.erf(wide * math.sqrt(0.5)).add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def silu_and_mul(x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """x: (rows, 2 * size), gate then up -> (rows, size) = silu(gate) * up, computed in fp32.

    gelu: gelu(gate) by its tanh instead.
    """
    gated = activation.silu_and_mul if x.is_cuda else activation.reference_silu_and_mul
    return gated(x, gelu)
