"""What this machine offers, as plain numbers: the input of `config.resolve`."""

from __future__ import annotations

import torch

from octavo.config.machine import available_memory, cpu_name
from octavo.config.resolve import DeviceFacts


def probe_device() -> DeviceFacts:
    """Facts of the CPU: name, threads that torch uses, memory free now (container limit honoured)."""
    return DeviceFacts(
        kind="cpu",
        name=cpu_name(),
        num_threads=torch.get_num_threads(),
        available_bytes=available_memory(),
    )
