"""Where and on what a result was measured: machine, versions, and the tree that ran."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "transformers")


def describe_environment() -> dict[str, Any]:
    """Versions, processor, GPU and driver if there is one, git commit and tree hashes of src/, tests/.

    Outside a git checkout the hashes are None.
    """
    return {
        "time": _now(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "gpu": _command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "commit": _git("rev-parse", "HEAD"),
        "src_tree": _git("rev-parse", "HEAD:src"),
        "tests_tree": _git("rev-parse", "HEAD:tests"),
        "dirty": bool(_git("status", "--porcelain", "--", "src", "tests")),
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    return _command("git", "-C", str(Path(__file__).parent), *arguments)


def _command(*arguments: str) -> str | None:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
