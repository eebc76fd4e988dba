"""This machine's processor and memory, read from the operating system. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    "memory.max memory.current memory.stat inactive_file",
    "memory/memory.limit_in_bytes memory/memory.usage_in_bytes memory/memory.stat total_inactive_file",
)
"""Limit, usage, and the file and name of pages of files in it that are given back when needed."""


def available_memory() -> int:
    """Bytes that can be taken without swapping: MemAvailable, or what the container has left."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if said := _value(Path("/proc/meminfo"), "MemAvailable:"):
        available = int(said.split()[0]) * 1024
    for *files, stat, name in map(str.split, _CGROUP_FILES):
        limit, usage = (_value(_CGROUP / file) for file in files)
        if limit.isdigit() and usage.isdigit():
            cached = int(_value(_CGROUP / stat, f"{name} ") or 0)
            available = min(available, max(0, int(limit) - int(usage) + cached))
    return available


def cpu_name() -> str:
    """The processor's model name."""
    said = _value(Path("/proc/cpuinfo"), "model name")
    return said.lstrip("\t :") or platform.processor() or platform.machine()


def cpu_flags() -> str:
    """What an x86 processor can do, in words with spaces between them, where Linux says it."""
    return _value(Path("/proc/cpuinfo"), "flags")


def _value(path: Path, name: str = "") -> str:
    """The rest of the first line that begins with `name`; empty without such a line or file."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), "")
