"""This machine's processor and memory, read from the operating system. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Bytes that can be taken without swapping: MemAvailable, or what the container has left."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if said := _value("/proc/meminfo", "MemAvailable:"):
        available = int(said.split()[0]) * 1024
    for files in _CGROUP_FILES:
        limit, usage = (_value(file) for file in files)
        if limit.isdigit() and usage.isdigit():
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def cpu_name() -> str:
    """The processor's model name."""
    said = _value("/proc/cpuinfo", "model name")
    return said.lstrip("\t :") or platform.processor() or platform.machine()


def _value(path: str, name: str = "") -> str:
    """The rest of the first line that begins with `name`; empty without such a line or file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), "")
