"""What this machine offers, as plain numbers: the input of `config.resolve`."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from typing import Literal

import torch

from octavo import env
from octavo.config.machine import available_memory, cpu_flags, cpu_name
from octavo.config.resolve import DeviceFacts
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (9, 0)


def initialise_math() -> None:
    """Call the vector functions of the CPU once on one thread, before several do at once.

    The first call of exp or log in a process, if made by several threads, gave wrong values (up to
    1e-4) on one thread's rows in 4 of 304 processes: MKL sets itself up on first use. Tensors this
    small stay on one thread.
    """
    for dtype in (torch.float32, torch.float64):
        values = torch.linspace(0.5, 1.5, 64, dtype=dtype)
        for function in (torch.exp, torch.log, torch.cos, torch.sin, torch.rsqrt, torch.erf):
            function(values)


def probe_device(wanted: Literal["auto", "cpu", "cuda"] = "auto") -> DeviceFacts:
    """Facts of the device to run on; auto takes a GPU that the kernels are made for.

    Memory is what is free now (a CPU container's limit honoured). Raises ConfigError if a GPU is
    asked for and cannot be used.
    """
    if wanted != "cpu":
        problem = _gpu_problem()
        if problem is None:
            free, total = torch.cuda.mem_get_info()
            name = torch.cuda.get_device_name()
            return DeviceFacts("cuda", name, torch.get_num_threads(), free, total)
        if wanted == "cuda":
            raise ConfigError(f"device='cuda': {problem}")
        if torch.cuda.is_available():
            logger.warning("running on the CPU: %s", problem)
    facts = DeviceFacts("cpu", cpu_name(), torch.get_num_threads(), available_memory())
    return replace(facts, own_kernels=env.cpu_kernels() and "avx512f" in cpu_flags().split())


def _gpu_problem() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here; use device='auto' or 'cpu'"
    if (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"{torch.cuda.get_device_name()} has compute capability {found}; 9.0 is the least"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install -e '.[gpu]'"
    return None
