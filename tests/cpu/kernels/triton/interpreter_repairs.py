"""Three things that the interpreter of Triton 3.6 gets wrong and these tests need right.

1. fp32 -> bf16 cuts bits off; every GPU rounds to nearest even.
2. tl.dot of bf16 multiplies the bit patterns, as integers.
3. A run-time integer cannot be a loop bound: NumPy 2.4 no longer turns arrays of one into an int.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from octavo.kernels.triton.lang import tl


def repair() -> None:
    """Mends the interpreter of this process; a second call changes nothing."""
    if hasattr(interpreter, "octavo_repaired"):
        return
    interpreter.octavo_repaired = True
    _round_bf16()
    _multiply_bf16()
    _allow_integer_bounds()


def _round_bf16() -> None:
    convert = interpreter._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert(data, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    interpreter._convert_float = rounding


def _multiply_bf16() -> None:
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def widened(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
        return plain(self, a, b, d, *options)

    builder.create_dot = widened


def _allow_integer_bounds() -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
