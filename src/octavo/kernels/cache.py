"""Compiled kernels on disk: one checksummed file an entry, replaced atomically.

Safe for any number of processes without locks: two that miss at once both compile and both write
the same bytes. A torn, truncated or foreign file is noticed and compiled again, over it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from importlib import metadata
from pathlib import Path

from octavo import env
from octavo.kernels import jit
from octavo.kernels.jit import Compiled

logger = logging.getLogger(__name__)


def directory() -> Path:
    return env.cache_dir() / "kernels"


def key_of(source: str, flags: tuple[str, ...], version: str) -> str:
    """Hash of everything that decides the machine code; `source` is the inlined text."""
    digest = hashlib.sha256()
    for part in (version, *flags, source):
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()[:32]


def compile_cached(source: str, *, name: str = "kernel.cu") -> Compiled:
    """`jit.compile_source` behind the disk cache. Raises KernelError as that does."""
    inlined = jit.inline_includes(source, name)
    wheels = metadata.distributions(name="nvidia-cuda-nvrtc")  # NVRTC does not tell its patch level
    version = jit.nvrtc_version() + "".join(wheel.version for wheel in wheels)
    key = key_of(inlined, jit.compile_flags(), version)
    path = directory() / f"{key}.kernel"
    found = load(path, inlined)
    if found is None:
        found = jit.compile_source(source, name=name)
        head = {"ptx": found.ptx, "log": found.log}
        write(path, json.dumps(head).encode() + b"\n" + found.cubin)
    return found


def load(path: Path, source: str) -> Compiled | None:
    """The entry at `path`, or None if there is none that can be used."""
    text, _, cubin = (read(path) or b"").partition(b"\n")
    try:
        head = json.loads(text)
        return Compiled(source, cubin, head["ptx"], head["log"])
    except (KeyError, TypeError, ValueError):  # none, or another Octavo's
        return None


def write(path: Path, data: bytes) -> bool:
    """Puts the data and, behind it, its digest at `path`, in one step, over what was there.

    True if it was written: a full or read-only disk costs only the caching.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder, path.name)
            whole.write_bytes(data + hashlib.sha256(data).digest())
            whole.replace(path)
    except OSError as error:
        logger.warning("kernel cache: cannot write %s: %s", path, error)
        return False
    return True


def read(path: Path) -> bytes | None:
    """What `write` put there, or None if there is nothing or it is not whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    data, digest = data[:-32], data[-32:]
    if hashlib.sha256(data).digest() != digest:
        logger.warning("kernel cache: %s is corrupt; compiling again", path)
        return None
    return data
