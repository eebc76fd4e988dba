"""The gates of SwiGLU and GeGLU: silu(gate) * up or gelu(gate) * up in one pass, and in torch."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from octavo.errors import KernelError
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch, row_options

TWICE_ROOT = 2 * math.sqrt(2 / math.pi)
"""gelu(x) by its tanh is x * sigmoid(TWICE_ROOT * (x + 0.044715 x^3))."""
_TWICE_ROOT = tl.constexpr(TWICE_ROOT)


@triton.jit
def _silu_and_mul(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    pair = x + row * (2 * SIZE) + column
    gate = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pair + SIZE, mask=inside, other=0.0).to(tl.float32)
    logit = gate
    if GELU:
        logit = _TWICE_ROOT * (gate + 0.044715 * gate * gate * gate)
    activated = gate / (1.0 + tl.exp(-logit))
    tl.store(out + row * SIZE + column, (activated * up).to(out.dtype.element_ty), mask=inside)


@cache
def launch_options(size: int, gelu: bool = False) -> dict[str, int | bool]:
    """Constexprs and warps for rows of 2 * size."""
    return {"SIZE": size, "GELU": gelu, **row_options(size)}


def silu_and_mul(x: Tensor, gelu: bool = False) -> Tensor:
    """x: (rows, 2 * size) contiguous, gate then up -> (rows, size) = silu(gate) * up.

    gelu: gelu(gate) by its tanh instead. Computed in fp32, rounded once. Raises KernelError for
    strided rows.
    """
    if not x.is_contiguous():
        raise KernelError(f"silu_and_mul needs contiguous rows, not strides {x.stride()}")
    rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, size)
    options = launch_options(size, gelu)
    launch(_silu_and_mul, (rows, -(-size // options["BLOCK"])), x, out, **options)
    return out


def reference_silu_and_mul(x: Tensor, gelu: bool = False) -> Tensor:
    """`silu_and_mul` in plain torch, which is how a CPU does it.

    Not F.silu: torch's CPU kernel uses another exp for the last few elements of a buffer, so bits
    would depend on where a row lies. torch.exp does not.
    """
    gate, up = x.float().chunk(2, dim=-1)
    logit = gate
    if gelu:
        logit = (gate * gate).mul_(0.044715).add_(1.0).mul_(gate).mul_(TWICE_ROOT)
    return (gate / torch.exp(-logit).add_(1.0)).mul_(up).to(x.dtype)
