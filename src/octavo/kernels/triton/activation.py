"""SwiGLU's gate: silu(gate) * up in one pass, and in torch."""

from __future__ import annotations

from functools import cache

import torch

from octavo.errors import KernelError
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch


@triton.jit
def _silu_and_mul(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    pair = x + row * (2 * SIZE) + column
    gate = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pair + SIZE, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * SIZE + column, (silu * up).to(out.dtype.element_ty), mask=inside)


@cache
def launch_options(size: int) -> dict[str, int]:
    """Constexprs and warps for rows of 2 * size; eight values a thread are one 16-byte load."""
    block = min(1 << (size - 1).bit_length(), 1024)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(block // 256, 1)}


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: (rows, 2 * size) contiguous, gate then up -> (rows, size) = silu(gate) * up.

    Computed in fp32, rounded once. Raises KernelError for strided rows.
    """
    if not x.is_contiguous():
        raise KernelError(f"silu_and_mul needs contiguous rows, not strides {x.stride()}")
    rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, size)
    if rows:
        options = launch_options(size)
        launch(_silu_and_mul, (rows, -(-size // options["BLOCK"])), x, out, **options)
    return out


def reference_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` in plain torch, which is how a CPU does it.

    Not F.silu: torch's CPU kernel uses another exp for the last few elements of a buffer, so bits
    would depend on where a row lies. torch.exp does not.
    """
    gate, up = x.float().chunk(2, dim=-1)
    silu = gate / torch.exp(-gate).add_(1.0)
    return silu.mul_(up).to(x.dtype)
