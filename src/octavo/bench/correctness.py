"""Is a rung right? One problem against a float64 oracle.

The output is poisoned, so an unwritten element shows; and so is what lies around and between its
rows, where a write past an edge shows. Comparisons are written so that NaN fails them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.kernels import ops
from octavo.kernels.matmul.registry import Rung

# A quiet NaN with a payload that no kernel produces.
_POISON = {torch.bfloat16: (torch.int16, 0x7FD5), torch.float32: (torch.int32, 0x7FD5ABCD)}
# Rounding to bf16 alone gives an error of 1.7e-3 of the norm; fp32 sums stay far below 1e-5.
_NORM_LIMIT = {"bf16": 2.5e-3, "fp32": 1e-5}


@dataclass(frozen=True)
class Check:
    """One checked problem. `worst` is the largest error over its own element's tolerance,
    `relative_norm` that of the whole, which must stay within `norm_limit`.
    """

    rung: str
    shape: tuple[int, int, int]
    """M, N, K."""
    finite: bool
    guards_intact: bool
    worst: float
    relative_norm: float
    norm_limit: float

    @property
    def ok(self) -> bool:
        exact_enough = self.worst <= 1.0 and self.relative_norm <= self.norm_limit
        return self.finite and self.guards_intact and exact_enough


@dataclass
class Problem:
    """Operands of one multiplication on the current CUDA device; `out` is a view into its buffer."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    out_buffer: torch.Tensor

    def poison(self) -> None:
        integer, pattern = _POISON[self.out.dtype]
        self.out_buffer.view(integer).fill_(pattern)

    def guards_intact(self) -> bool:
        """True if nothing outside `out` changed. Call after `poison` and one launch."""
        integer, pattern = _POISON[self.out.dtype]
        outside = self.out_buffer.view(integer) == pattern
        outside.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset()).fill_(True)
        return bool(outside.all())


def oracle(rung: Rung, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact product in float64 and, for each element, the sum of |a| |b| that bounds its error."""
    a, b = problem.a.double(), problem.b.double()
    if rung.dtype == "bf16":
        b = b.t()
    return a @ b, a.abs() @ b.abs()


def compare(rung: Rung, problem: Problem) -> Check:
    """Judges what is in `problem.out`. Tolerance of an element: output rounding plus accumulation."""
    (m, k), n = problem.a.shape, problem.out.shape[1]
    exact, magnitude = oracle(rung, problem)
    error = (problem.out.double() - exact).abs()
    if rung.dtype == "bf16":
        # Half an ulp of bf16 is at most 2^-8; the tensor cores truncate when they align sums.
        tolerance = exact.abs() * 2.0**-8 + magnitude * 2.0**-18
    else:
        tolerance = magnitude * (4.0 * k**0.5) * 2.0**-24
    finite, intact = bool(torch.isfinite(problem.out).all()), problem.guards_intact()
    worst, norm = float((error / tolerance).max()), float(error.norm() / exact.norm())
    return Check(rung.name, (m, n, k), finite, intact, worst, norm, _NORM_LIMIT[rung.dtype])


def run_and_compare(rung: Rung, problem: Problem) -> Check:
    """Runs a rung once and judges the result."""
    problem.poison()
    ops.matmul(rung, problem.a, problem.b, problem.out)
    torch.cuda.synchronize()
    return compare(rung, problem)
