"""RMSNorm with the residual addition before it, one program a row, and in torch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from octavo.errors import KernelError
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch


@triton.jit
def apply_weight(normed, weight, dtype: tl.constexpr, UNIT: tl.constexpr):
    """fp32 values times the weight, or times 1 + weight, rounded where either family rounds."""
    if UNIT:
        return (normed * (1.0 + weight)).to(dtype)
    else:
        return (normed.to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def _rms_norm(
    x, residual, weight, out, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADD:
        # Rounded to the dtype before the statistics: they describe what the next layer will add to.
        before = tl.load(residual + row + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        tl.store(residual + row + column, value, mask=inside)
    scale = tl.load(weight + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    variance = tl.sum(wide * wide, 0) / HIDDEN
    scaled = apply_weight(wide * tl.rsqrt(variance + eps), scale.to(tl.float32), value.dtype, UNIT)
    tl.store(out + row + column, scaled, mask=inside)


@cache
def launch_options(hidden: int, add: bool, unit_offset: bool = False) -> dict[str, int | bool]:
    """Constexprs and warps: of the row's length only, so that a row's bits know no other rows."""
    block = 1 << (hidden - 1).bit_length()
    # Eight values a thread are one 16-byte load; beyond 16 warps a thread takes more of them.
    warps = min(max(block // 256, 1), 16)
    return {"HIDDEN": hidden, "BLOCK": block, "ADD": add, "UNIT": unit_offset, "num_warps": warps}


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """x, residual: (rows, hidden) contiguous; weight: (hidden,). Returns (normed, residual).

    The residual becomes x + residual, in place, and its root mean square is what normed is divided
    by; without one, x itself is normed and returned as the residual. Statistics in fp32; rounded to
    the dtype before the weight is applied. unit_offset: multiplied by 1 + weight, as in Gemma, and
    rounded only after that. Raises KernelError for strided rows.
    """
    if not x.is_contiguous() or not (residual is None or residual.is_contiguous()):
        raise KernelError(f"rms_norm needs contiguous rows, not strides {x.stride()}")
    rows, hidden = x.shape
    out = torch.empty_like(x)
    summed = x if residual is None else residual
    options = launch_options(hidden, residual is not None, unit_offset)
    launch(_rms_norm, (rows,), x, summed, weight, out, eps, **options)
    return out, summed


def reference_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """`rms_norm` in torch, as a CPU does it; a residual stays as it was, the sum is a new tensor."""
    summed = x if residual is None else x + residual
    wide = summed.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype), summed
    return weight * normed.to(x.dtype), summed
