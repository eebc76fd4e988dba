"""Launches that happen every step: a kernel with its compile-time values, without Triton's binding.

What Triton does for each call costs 40 to 70 us of the host on a server's processor, as much as the
rest of a small step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_ALIGNMENT = 15  # Triton makes other machine code for pointers that are no multiple of 16


class Launcher:
    """Compiles when arguments of a new kind come; otherwise only launches."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        """options: the constexpr parameters, which come last, num_warps and other options."""
        self._kernel, self._options = kernel, options
        self._constants = tuple(
            options[name] for name in getattr(kernel, "arg_names", ()) if name in options
        )
        params = getattr(kernel, "params", ())
        self._specialised = [p.num for p in params if not (p.is_constexpr or p.do_not_specialize)]
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Queue the kernel on the current stream."""
        self.bind(grid, *args)()

    def bind(self, grid: tuple[int, ...], *args: Any) -> Callable[[], None]:
        """The same launch as often as it is called: types and addresses are looked at only once."""
        key = tuple(
            (arg.dtype, arg.data_ptr() & _ALIGNMENT) if isinstance(arg, torch.Tensor) else arg
            for arg in [args[number] for number in self._specialised]
        )
        # Triton's launcher takes addresses, too, and asks the driver about each tensor.
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        shape = (*grid, 1, 1)[:3]

        def launch() -> None:
            compiled = self._compiled.get(key)
            if compiled is None:
                # The interpreter returns none, and every call goes this way.
                self._compiled[key] = self._kernel[grid](*args, **self._options)
                return
            compiled.run(
                *shape,
                torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()),
                compiled.function,
                compiled.packed_metadata,
                None,  # launch metadata and hooks are for profilers
                None,
                None,
                *values,
                *self._constants,
            )

        return launch


@cache
def row_options(size: int) -> dict[str, int]:
    """BLOCK and warps for rows of `size` that programs share: eight values a thread are one load."""
    block = min(1 << (size - 1).bit_length(), 1024)
    return {"BLOCK": block, "num_warps": max(block // 256, 1)}


_LAUNCHERS: dict[tuple[Any, ...], Launcher] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)` by a Launcher that is kept for these options.

    Nothing happens for an empty grid.
    """
    if 0 in grid:
        return
    key = (id(kernel), *options.values())  # its own hash is computed anew each time
    launcher = _LAUNCHERS.get(key)
    if launcher is None:
        launcher = _LAUNCHERS[key] = Launcher(kernel, **options)
    launcher(grid, *args)
