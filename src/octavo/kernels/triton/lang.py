"""Triton, or what lets its kernels be imported where it is not installed (a plain CPU).

Every module of this package takes `triton` and `tl` from here, so that the layers can import their
GPU ops at the top. Without Triton a kernel stays a plain function, and launching one raises.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Stands for `triton` and `tl`: types for annotations, and kernels that cannot run."""

        class constexpr:
            def __init__(self, value: Any) -> None:
                self.value = value

        @staticmethod
        def jit(function: Any = None, **options: Any) -> Any:
            return _Kernel if function is None else _Kernel(function)

    class _Kernel:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getitem__(self, grid: Any) -> Any:
            raise ConfigError(f"{self.function.__name__} needs Triton: pip install -e '.[gpu]'")

    triton = tl = _Absent()

__all__ = ["tl", "triton"]
