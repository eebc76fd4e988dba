"""Operands with every trap that we know of set: a read or a write past an edge shows."""

from __future__ import annotations

import torch

from octavo.bench.correctness import Problem
from octavo.kernels.matmul.registry import Rung

_GUARD_ELEMENTS = 64  # before the first row and after the last one; keeps 128-byte alignment


def make_problem(rung: Rung, m: int, n: int, k: int, seed: int, device: str = "cuda") -> Problem:
    """Fresh normal(0, 1) operands for a rung, in its layout; bf16 rows are longer than they need be."""
    generator = torch.Generator(device).manual_seed(seed)
    is_bf16 = rung.dtype == "bf16"
    dtype = torch.bfloat16 if is_bf16 else torch.float32

    def guarded(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        stride = cols + 16 * is_bf16
        size = rows * stride + 2 * _GUARD_ELEMENTS
        buffer = torch.full((size,), float("nan"), dtype=dtype, device=device)
        return buffer.as_strided((rows, cols), (stride, 1), _GUARD_ELEMENTS), buffer

    a = guarded(m, k)[0].normal_(generator=generator)
    b = guarded(*(n, k) if is_bf16 else (k, n))[0].normal_(generator=generator)
    return Problem(a, b, *guarded(m, n))
