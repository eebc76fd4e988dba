"""Activations of the MLP, gated and plain."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from octavo.kernels.cpu.native import LANES, cpu_kernels
from octavo.kernels.triton import activation


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> x times the normal distribution function of x, by erf, computed in fp32."""
    if x.is_cuda:
        return F.gelu(x)
    wide = x.float()  # not F.gelu, for the reason below
    return torch.erf(wide * math.sqrt(0.5)).add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def silu_and_mul(x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """x: (rows, 2 * size), gate then up -> (rows, size) = silu(gate) * up, computed in fp32.

    gelu: gelu(gate) by its tanh instead. Not F.silu: torch's CPU kernel uses another exp for the last
    few elements of a buffer, so bits would depend on where a row lies. torch.exp does not.
    """
    if x.is_cuda:
        return activation.silu_and_mul(x, gelu)
    if x.shape[1] % (2 * LANES) == 0 and (kernels := cpu_kernels(x.dtype)):
        return kernels.silu_and_mul(x, gelu)
    gate, up = x.float().chunk(2, dim=-1)
    logit = gate
    if gelu:
        logit = (gate * gate).mul_(0.044715).add_(1.0).mul_(gate).mul_(activation.TWICE_ROOT)
    return (gate / torch.exp(-logit).add_(1.0)).mul_(up).to(x.dtype)
