"""Kernel tests run in Triton's interpreter, once it is mended."""

from __future__ import annotations

from tests.cpu.kernels.triton.interpreter_repairs import repair

repair()
