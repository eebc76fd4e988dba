"""Every environment variable that Octavo reads, typed; a bad value raises ConfigError."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import ConfigError


def cache_dir() -> Path:
    """OCTAVO_CACHE_DIR: compiled kernels and tuning tables. Default ~/.cache/octavo."""
    value = os.environ.get("OCTAVO_CACHE_DIR")
    try:
        return Path(value or "~/.cache/octavo").expanduser()
    except RuntimeError:
        if not value:
            return Path(os.devnull)  # no home, no cache: nothing is found or written below that
        text = f"OCTAVO_CACHE_DIR={value!r}: there is no such home directory; name another folder"
        raise ConfigError(text) from None


def log_level() -> str:
    """OCTAVO_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR, for the command line. Default WARNING."""
    value = os.environ.get("OCTAVO_LOG_LEVEL", "WARNING").upper()
    if value not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"OCTAVO_LOG_LEVEL={value!r} is not DEBUG, INFO, WARNING or ERROR")
    return value


def check_integrity() -> bool:
    """OCTAVO_CHECK_INTEGRITY=1: verify the core's invariants after every step (tests set it)."""
    return _switch("OCTAVO_CHECK_INTEGRITY", "0")


def cpu_kernels() -> bool:
    """OCTAVO_CPU_KERNELS=0: torch alone on a CPU, as where there is no C compiler."""
    return _switch("OCTAVO_CPU_KERNELS", "1")


def _switch(name: str, default: str) -> bool:
    value = os.environ.get(name, default)
    if value not in ("0", "1"):
        raise ConfigError(f"{name}={value!r} is not 0 or 1")
    return value == "1"


def shorten_openmp_spins() -> None:
    """Let OpenMP threads sleep soon at a barrier, unless the user set their waiting policy.

    libgomp reads this once, when torch loads it. By default a thread spins for milliseconds; on a
    machine shared with other work that made a step ten times slower (docs/log.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
