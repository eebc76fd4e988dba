"""Where a measurement comes from: GPU, driver, versions, and the git tree hashes of src/ and tests/.

Tree hashes are computed from the files themselves, as git would, because the GPU machine gets a
copy of the working tree without its history: equal hashes mean equal code, committed or not.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from octavo.bench.clocks import load_nvml
from octavo.config.machine import cpu_name
from octavo.kernels import jit

ROOT = Path(__file__).resolve().parents[3]


def git_tree_hash(folder: Path) -> str:
    """The hash that `git rev-parse HEAD:folder` prints if exactly these files are committed.

    Empty for a folder without files: git knows none.
    """
    entries: list[tuple[bytes, bytes]] = []
    for path in folder.iterdir():
        name = path.name.encode()
        if path.name == "__pycache__" or path.suffix in (".egg-info", ".pyc"):
            continue
        if path.is_dir():
            mode, place, digest = b"40000", name + b"/", git_tree_hash(path)
        else:
            mode, place = b"100755" if os.access(path, os.X_OK) else b"100644", name
            digest = _object_hash("blob", path.read_bytes())
        if digest:
            entries.append((place, mode + b" " + name + b"\0" + bytes.fromhex(digest)))
    return _object_hash("tree", b"".join(entry for _, entry in sorted(entries))) if entries else ""


def _object_hash(kind: str, body: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body, usedforsecurity=False).hexdigest()


def describe() -> dict[str, object]:
    """The environment block of a results file; the GPU's part only where there is one.

    Tree hashes are None where the package does not lie in a checkout.
    """
    in_checkout = (ROOT / "src" / "octavo").is_dir() and (ROOT / "tests").is_dir()
    facts: dict[str, object] = {
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "src_tree": git_tree_hash(ROOT / "src") if in_checkout else None,
        "tests_tree": git_tree_hash(ROOT / "tests") if in_checkout else None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        nvml, driver = load_nvml(), ctypes.create_string_buffer(96)
        unknown = nvml is None or nvml.nvmlSystemGetDriverVersion(driver, len(driver))
        facts |= {
            "gpu": properties.name,
            "sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "driver": "unknown" if unknown else driver.value.decode(),
            "cuda": torch.version.cuda,
            "nvrtc": jit.nvrtc_version(),
        }
    return facts
