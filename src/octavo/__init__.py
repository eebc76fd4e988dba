"""Octavo: LLM inference and serving on its own Hopper matmul kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.env import shorten_openmp_spins
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"

shorten_openmp_spins()


def __getattr__(name: str) -> Any:
    # LLM brings torch with it; `octavo kernels list` and other light users must not pay for that.
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
