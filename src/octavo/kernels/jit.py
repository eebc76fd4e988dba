"""CUDA C++ text in, machine code out: header inlining, NVRTC, and the compiler's resource report.

Needs no GPU and no driver. It owns the compile flags and the parsing of the compile log; the disk
cache is `kernels.cache`, loading and launching are `kernels.launch`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import KernelError

MATMUL_DIR = Path(__file__).parent / "matmul"
ARCH = "sm_90a"
# --no-cache: beside a driver NVRTC keeps a cache of its own, and a hit there has an empty log, so
# neither registers nor serialised wgmma would be seen.
BASE_FLAGS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
# ptxas says one of these when it had to serialise wgmma (an accumulator was touched in flight):
# the kernel stays right but loses half its speed, so tests and the harness treat it as a failure.
SERIALIZED_WGMMA = ("C7510", "C7511", "C7514", "C7515")

_INCLUDE = re.compile(
    r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"]+)"|<([^>]+)>)[ \t]*(?://.*)?$', re.MULTILINE
)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)
# In the order of the fields of KernelResources.
_REPORTED = (
    r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads",
    r"(\d+) bytes stack frame", r"(\d+) bytes smem",
)  # fmt: skip
# Virtual: line tables must not depend on the machine or the working directory.
_VIRTUAL_ROOT = "/octavo"


@dataclass(frozen=True)
class KernelResources:
    """What ptxas reported for one `__global__` function; sizes in bytes, per thread or per CTA."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int


@dataclass(frozen=True)
class Compiled:
    """One translation unit after NVRTC.

    `source` is the text after inlining, `cubin` an ELF, `ptx` its intermediate form (to read, never
    to load: a newer NVRTC writes PTX that an older driver cannot assemble).
    """

    source: str
    cubin: bytes
    ptx: str
    log: str

    @property
    def resources(self) -> dict[str, KernelResources]:
        """What the log's `ptxas -v` lines say, by kernel."""
        sections = re.split(r"Compiling entry function '([^']+)' for", self.log)
        found = {}
        for name, text in zip(sections[1::2], sections[2::2], strict=True):
            matches = (re.search(pattern, text) for pattern in _REPORTED)
            found[name] = KernelResources(*(int(match[1]) if match else 0 for match in matches))
        return found


def inline_includes(source: str, name: str = "kernel.cu", root: Path = MATMUL_DIR) -> str:
    """Replaces each `#include "x"` by the file's text, once, relative to `root`.

    Keeps the compiler free of include paths and makes the cache key a hash of everything that
    matters. `#line` marks keep messages and line tables pointing at the original files.
    Raises KernelError for a system header (they cost up to 2 s a compile) or a missing file.
    """
    seen: set[str] = set()

    def expand(text: str, file: str) -> str:
        def header(match: re.Match[str]) -> str:
            quoted, inlined = match[1], ""
            if quoted is None:
                raise KernelError(f"{file}: system header <{match[2]}> is not allowed")
            if quoted not in seen:
                seen.add(quoted)
                path = root / quoted
                if ".." in path.parts or root not in path.parents or not path.is_file():
                    raise KernelError(f"{file}: cannot find {quoted!r} under {root.name}/")
                inlined = expand(_PRAGMA_ONCE.sub("", path.read_text("utf-8")), quoted)
            next_line = text.count("\n", 0, match.end()) + 2
            return f'{inlined}\n#line {next_line} "{_VIRTUAL_ROOT}/{file}"'

        return f'#line 1 "{_VIRTUAL_ROOT}/{file}"\n{_INCLUDE.sub(header, text)}'

    return expand(source, name)


def compile_flags(extra_flags: Iterable[str] = ()) -> tuple[str, ...]:
    return (f"--gpu-architecture={ARCH}", *BASE_FLAGS, *extra_flags)


def compile_source(
    source: str, *, name: str = "kernel.cu", extra_flags: Iterable[str] = ()
) -> Compiled:
    """Compiles CUDA C++ (extern "C" kernels, our own headers only) to PTX and CUBIN. No GPU needed.

    Raises KernelError with the compiler's log when NVRTC is missing or the source is wrong.
    """
    inlined = inline_includes(source, name)
    return Compiled(inlined, *_run_nvrtc(inlined, name, compile_flags(extra_flags)))


def nvrtc_version() -> str:
    """Version of the run-time compiler, "13.0". Raises KernelError when it is not installed."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def _nvrtc() -> Any:  # cuda.bindings ships no type stubs
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # ImportError, or the bindings' own "library not found"
        missing = "the CUDA run-time compiler is missing: pip install -e '.[kernels]', or '.[gpu]'"
        raise KernelError(f"{missing} ({error})") from error
    return nvrtc


def _run_nvrtc(source: str, name: str, flags: tuple[str, ...]) -> tuple[bytes, str, str]:
    nvrtc = _nvrtc()

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise KernelError(f"NVRTC: {result[0].name} for {name}")
        return result[1] if len(result) > 1 else None

    def text(size_of: Any, fill: Any) -> bytes:
        buffer = bytearray(checked(size_of(program)))
        blob = bytes(buffer)  # the bindings write into this immutable buffer
        checked(fill(program, blob))
        return blob

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])[0]
        log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        log_text = log.rstrip(b"\0 \n").decode(errors="replace")
        if int(status):
            raise KernelError(f"{name} does not compile ({status.name}):\n{log_text}")
        ptx = text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0").decode()
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), ptx, log_text
    finally:
        nvrtc.nvrtcDestroyProgram(program)
