"""What this machine offers, as plain numbers: the input of `config.resolve`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from octavo.config.resolve import DeviceFacts

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def probe_device() -> DeviceFacts:
    """Facts of the CPU: name, threads that torch uses, memory free now (container limit honoured)."""
    return DeviceFacts(
        kind="cpu",
        name=_cpu_name(),
        num_threads=torch.get_num_threads(),
        available_bytes=available_memory(),
        has_bf16=torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    )


def available_memory() -> int:
    """Bytes that can be taken without swapping: MemAvailable, or what the container has left."""
    available = int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage))
    return available


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"
