"""Our kernels as torch ops, so that torch.compile, CUDA graphs and FakeTensor know them.

Out-variants only: they cost the least dispatch, and the engine owns its buffers anyway.
"""

from __future__ import annotations

import torch

from octavo.kernels.matmul import host
from octavo.kernels.matmul.registry import Rung
from octavo.kernels.matmul.registry import rung as find_rung

_library = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("ladder_matmul(int rung, Tensor a, Tensor b, Tensor(a!) out) -> ()")  # type: ignore[no-untyped-call]


for _backend in ("CUDA", "CPU"):  # on a CPU it says what it needs
    _library.impl("ladder_matmul", host.run, _backend)  # type: ignore[no-untyped-call]
# Only `out` changes, and neither its shape nor its strides do.
torch.library.register_fake("octavo::ladder_matmul", lambda rung, a, b, out: None)


def matmul(rung: Rung | int | str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Runs one rung of the ladder on the current stream: out = a b (fp32) or a b^T (bf16).

    a: (M, K); b: (K, N) for fp32 rungs, (N, K) for bf16 rungs; out: (M, N), same dtype. K is a
    multiple of 8. fp32 operands are contiguous; bf16 rows may be strided, by multiples of 8
    elements for a and b. Raises KernelError, before any launch, for what does not fit.
    """
    if isinstance(rung, str):
        rung = find_rung(rung)
    number = rung if isinstance(rung, int) else rung.number
    torch.ops.octavo.ladder_matmul.default(number, a, b, out)
