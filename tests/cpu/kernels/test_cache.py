"""The kernel cache: hits, corruption, concurrency, and a disk that refuses to be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import ConfigError, KernelError
from octavo.kernels import cache, jit

SOURCE = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] += 1.0f; }\n'


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))


@pytest.fixture
def compile_count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    real = jit.compile_source

    def counting(source: str, **kwargs: str) -> jit.Compiled:
        calls.append(source)
        return real(source, **kwargs)

    monkeypatch.setattr(jit, "compile_source", counting)
    return calls


def entries() -> list[Path]:
    return sorted(cache.directory().iterdir())


def test_second_call_reads_the_disk(compile_count: list[str]) -> None:
    first = cache.compile_cached(SOURCE)
    second = cache.compile_cached(SOURCE)
    assert len(compile_count) == 1
    assert second == first
    assert [p.suffix for p in entries()] == [".kernel"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign", "{}", "[]", "text"])
def test_corrupt_entry_is_noticed_and_rebuilt(compile_count: list[str], damage: str) -> None:
    good = cache.compile_cached(SOURCE)
    path = entries()[0]
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[-100] ^= 1
    elif damage == "empty":
        data = bytearray()
    elif damage in ("{}", "[]", "text"):  # the head of another layout
        cache.write(path, damage.encode() + b"\ncubin")
        data = bytearray(path.read_bytes())
    else:
        data = bytearray(b"something else entirely")
    path.write_bytes(data)
    assert cache.compile_cached(SOURCE).cubin == good.cubin
    assert len(compile_count) == 2
    cache.compile_cached(SOURCE)
    assert len(compile_count) == 2, "the rebuilt entry is good again"


def test_a_corrupt_entry_that_cannot_be_removed_costs_only_the_caching(
    monkeypatch: pytest.MonkeyPatch, compile_count: list[str]
) -> None:
    """As on a read-only disk."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    cache.compile_cached(SOURCE)
    entries()[0].write_bytes(b"torn")
    for where in ("tempfile.mkdtemp", "os.unlink", "pathlib.Path.unlink"):
        monkeypatch.setattr(where, refuse)
    assert cache.compile_cached(SOURCE).cubin
    assert len(compile_count) == 2
    assert entries()[0].read_bytes() == b"torn"


def test_key_covers_source_headers_flags_and_compiler(tmp_path: Path) -> None:
    flags = jit.compile_flags()
    (tmp_path / "x.cuh").write_text("int a;\n")
    before = jit.inline_includes('#include "x.cuh"\n', root=tmp_path)
    (tmp_path / "x.cuh").write_text("int b;\n")
    after = jit.inline_includes('#include "x.cuh"\n', root=tmp_path)
    keys = {
        cache.key_of(SOURCE, flags, "13.0"),
        cache.key_of(SOURCE + " ", flags, "13.0"),
        cache.key_of(SOURCE, (*flags, "-DX"), "13.0"),
        cache.key_of(SOURCE, jit.compile_flags("sm_90"), "13.0"),
        cache.key_of(SOURCE, flags, "13.5"),
        cache.key_of("b", ("a",), "c"),
        cache.key_of("", ("ab",), "c"),
        cache.key_of(before, flags, "13.0"),
        cache.key_of(after, flags, "13.0"),
    }
    assert len(keys) == 9


def test_many_processes_at_once_leave_one_good_entry() -> None:
    program = (
        "import hashlib; from octavo.kernels import cache;"
        f"print(hashlib.sha256(cache.compile_cached({SOURCE!r}).cubin).hexdigest())"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = {worker.communicate(timeout=120)[0].strip() for worker in workers}
    assert all(worker.returncode == 0 for worker in workers)
    assert len(outputs) == 1
    assert "" not in outputs
    assert [p.suffix for p in entries()] == [".kernel"], "no temporary file is left"


def test_unwritable_cache_costs_only_the_caching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_count: list[str]
) -> None:
    blocker = tmp_path / "a_file"
    blocker.write_text("")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(blocker))
    assert cache.compile_cached(SOURCE).cubin
    assert cache.compile_cached(SOURCE).cubin
    assert len(compile_count) == 2


def test_a_home_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "~no-such-user-here/x")
    with pytest.raises(ConfigError, match="OCTAVO_CACHE_DIR='~no-such-user-here/x'"):
        cache.compile_cached(SOURCE)


def test_without_a_home_nothing_is_cached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OCTAVO_CACHE_DIR")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert cache.compile_cached(SOURCE).cubin
    assert "cannot write /dev/null/" in caplog.text


def test_broken_source_is_not_cached() -> None:
    with pytest.raises(KernelError):
        cache.compile_cached("int broken = ;\n")
    assert not cache.directory().exists() or not entries()
