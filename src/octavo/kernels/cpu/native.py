"""The CPU's own kernels: C sources compiled on this machine, for it, when they are first wanted.

GCC takes two seconds, and the result stays on disk. Without GCC, without AVX-512, or where the sources
do not compile, `cpu_kernels` gives None and the layers use torch instead.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from octavo import env
from octavo.config.machine import cpu_flags, cpu_name
from octavo.errors import ConfigError
from octavo.kernels.cache import directory, key_of, read, write

logger = logging.getLogger(__name__)

LANES = 16
"""Rows of a weight must be a multiple of it, ..."""
DEPTH = 32
"""... its columns of this."""
BLOCK_KINDS = {"Q4_0": (2, 18), "Q4_1": (3, 20), "Q8_0": (8, 34)}
"""GGUF types that stay packed: ggml's number, bytes of a block of DEPTH columns."""
_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
_ELEMENTS = {torch.float32: "-DELEM_FLOAT", torch.bfloat16: "-DELEM_BF16"}
_COMPILER = "gcc"
# OpenMP is compiled for and not linked: torch brings it, and a second runtime would be a second
# pool of threads. -z now: a function that torch does not bring is missed when the library is loaded.
# -Bsymbolic: no other library's function of the same name takes the place of ours.
_COMPILE = ("-O3", "-march=native", "-std=gnu17", "-Wno-psabi", "-fopenmp", "-fPIC", "-c")
_LINK = ("-shared", "-Wl,-z,now,-Bsymbolic", "-lm")
_LIMIT = 120  # seconds for the compiler

P, N, F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class Matrix(ctypes.Structure):
    """A packed weight (columns, depth), as linear.h has it, and its bias in fp32, or none."""

    _fields_ = [("packed", P), ("kind", N), ("bias", P), ("columns", N), ("depth", N)]


class CpuKernels:
    """Kernels on dense CPU tensors of one element type. Their threads are those of torch."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self.dtype = library, dtype
        library.pack_linear.argtypes = [P, P, N, N, N, ctypes.c_int]
        library.run_linear.argtypes = [P, P, P, N, ctypes.c_int]
        library.run_layers.argtypes = [P, P, P, P, N, N, P, P, P, P]
        self.has_amx = bool(library.start_linear())

    def pack(self, weight: torch.Tensor, kind: int = 0, depth: int = 0) -> torch.Tensor:
        """weight: (out_features, in_features) -> the same numbers, ordered for `linear`.

        Or, with ggml's number of their type and in_features, (out_features, bytes of blocks).
        """
        weight, packed = weight.contiguous(), torch.empty(weight.shape, dtype=weight.dtype)
        shape = len(weight), depth or weight.shape[1]
        pointers = packed.data_ptr(), weight.data_ptr()
        self._library.pack_linear(*pointers, kind, *shape, torch.get_num_threads())
        return packed

    def linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """x: (rows, in_features) -> (rows, out_features), same dtype."""
        x, out = x.contiguous(), x.new_empty(x.shape[0], matrix.columns)
        operands = out.data_ptr(), x.data_ptr(), ctypes.addressof(matrix)
        if not self._library.run_linear(*operands, x.shape[0], torch.get_num_threads()):
            raise MemoryError("no memory for the elements of a panel of weights")
        return out

    def run_layers(self, *arguments: object) -> None:
        """A stack of layers; `models.native_stack` makes the structures of stack.c."""
        if not self._library.run_layers(*arguments):
            raise MemoryError("no memory for the scratch of attention")


@cache
def cpu_kernels(dtype: torch.dtype) -> CpuKernels | None:
    """The kernels for tensors of this type, compiled if need be; None if there are none here."""
    # On narrower vectors than AVX-512's these sources are slower than torch.
    if not env.cpu_kernels() or dtype not in _ELEMENTS or "avx512f" not in cpu_flags().split():
        return None
    try:
        kernels = CpuKernels(_load((*_COMPILE, _ELEMENTS[dtype])), dtype)
    except (OSError, ConfigError, subprocess.SubprocessError) as error:
        logger.warning("no CPU kernels of our own, torch's are slower: %s", error)
        return None
    if dtype == torch.bfloat16 and "amx_bf16" in cpu_flags() and not kernels.has_amx:
        logger.warning("CPU kernels without AMX, slower and with other bits: no tile registers")
    return kernels


def _load(flags: tuple[str, ...]) -> ctypes.CDLL:
    """The compiled library, from disk if it is there whole: its last bytes are its own digest."""
    version = _run("--version", limit=10)
    # -march=native is this machine's; a home directory may be shared by several kinds.
    version += cpu_name() + cpu_flags()
    source = "".join(path.read_text("utf-8") for path in _SOURCES)
    path = directory() / f"{key_of(source, (*flags, *_LINK), version)}.so"
    if read(path) is None:
        with tempfile.TemporaryDirectory() as folder:
            made, library = f"{folder}/kernels.o", f"{folder}/kernels.so"
            _run(*flags, str(Path(__file__).with_name("stack.c")), "-o", made)
            _run(made, *_LINK, "-o", library)
            if not write(path, Path(library).read_bytes()):
                return ctypes.CDLL(library)  # its file may go when it is loaded
    return ctypes.CDLL(str(path))


def _run(*arguments: str, limit: int = _LIMIT) -> str:
    """What the compiler prints. Raises OSError with what it says if it fails."""
    done = subprocess.run(
        [_COMPILER, *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=limit,
    )
    if done.returncode:
        raise OSError(f"{_COMPILER} {' '.join(arguments)}: {done.stderr.strip()[:500]}")
    return done.stdout
