"""The CPU's own kernels: C sources compiled on this machine, for it, when they are first wanted.

Any C compiler will do; it takes a second and the result stays on disk. Without one, or where the
sources do not compile, `cpu_kernels` gives None and the layers use torch instead.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octavo import env
from octavo.config.machine import cpu_name
from octavo.kernels.cache import directory, key_of
from octavo.logging import get_logger

logger = get_logger(__name__)

LANES = 16
"""What is a multiple of this, the kernels can work on."""
AMX_DEPTH = 32
"""What in_features must be a multiple of."""
_SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("decoder.c", "linear_amx.c", "stack.c")
)
_ELEMENTS = {torch.float32: "-DELEM_FLOAT", torch.bfloat16: "-DELEM_BF16"}
# OpenMP is compiled for and not linked: torch brings it, and a second runtime would be a second
# pool of threads. -z now: a function that torch does not bring is missed when the library is loaded.
_COMPILE = ("-O3", "-march=native", "-std=gnu17", "-Wno-psabi", "-fopenmp", "-fPIC", "-c")
_LINK = ("-shared", "-Wl,-z,now", "-lm")
_LIMIT = 120  # seconds for the compiler

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm": [_P] * 5 + [_N, _N, _F, _I, _I],
    "silu_and_mul": [_P, _P, _N, _N, _I, _I],
    "rotate_and_write": [_P] * 5 + [_F, _I, _P, _P, _P, _N, _I],
    "attend": [_P, _P, _N, _P, _P, _P, _P, _N, _N, _N, _P, _F, _N, _I],
    "amx_pack": [_P, _P, _N, _N, _I],
    "amx_linear": [_P, _P, _P, _P, _N, _N, _N, _I],
    "run_layers": [_P, _P, _P, _P, _N, _P, _P, _P, _P],
}


class HeadShape(ctypes.Structure):
    """Shapes of an attention layer and its cache, as decoder.c has them."""

    _fields_ = [(name, _N) for name in ("heads", "kv_heads", "head_dim", "block_size")]


class CpuKernels:
    """Kernels on dense CPU tensors of one element type. Their threads are those of torch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            if hasattr(library, name):
                getattr(library, name).argtypes = arguments
        self.has_amx = hasattr(library, "amx_available") and bool(library.amx_available())

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        unit_offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: (rows, size) -> normalised x + residual, and x + residual (or x itself)."""
        x = x.contiguous()
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        self._library.rms_norm(
            out.data_ptr(),
            total.data_ptr(),
            x.data_ptr(),
            None if residual is None else residual.contiguous().data_ptr(),
            weight.data_ptr(),
            x.numel() // x.shape[-1],
            x.shape[-1],
            eps,
            unit_offset,
            torch.get_num_threads(),
        )
        return out, total

    def silu_and_mul(self, x: torch.Tensor, gelu: bool) -> torch.Tensor:
        """x: (rows, 2 * size) -> (rows, size)."""
        x = x.contiguous()
        rows, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, size)
        threads = torch.get_num_threads()
        self._library.silu_and_mul(out.data_ptr(), x.data_ptr(), rows, size, gelu, threads)
        return out

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        unit_offset: bool,
        slot_mapping: torch.Tensor,
        kv_cache: torch.Tensor,
        shape: HeadShape,
    ) -> None:
        """Rotate q and k in qkv (tokens, all heads * head_dim), their norms first; write k and v.

        tables: cos and sin, (tokens, 1, head_dim / 2) fp32; norms: weights for q and k.
        """
        cos, sin = tables
        q_norm, k_norm = norms or (None, None)
        self._library.rotate_and_write(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            unit_offset,
            slot_mapping.data_ptr(),
            kv_cache.data_ptr(),
            ctypes.addressof(shape),
            qkv.shape[0],
            torch.get_num_threads(),
        )

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        tables: torch.Tensor,
        shape: HeadShape,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """query: (tokens, heads, head_dim), the rows of a token dense -> the same shape, dense.

        starts, seq_lens, tables: int32, of CommonAttentionMetadata; window: keys that a token sees.
        Rows past the last request are zero.
        """
        out = query.new_empty(query.shape)
        done = self._library.attend(
            out.data_ptr(),
            query.data_ptr(),
            query.stride(0),
            kv_cache.data_ptr(),
            starts.data_ptr(),
            seq_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            seq_lens.shape[0],
            query.shape[0],
            ctypes.addressof(shape),
            scale,
            window,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("no memory for the scratch of attention")
        return out

    def amx_pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: (out_features, in_features) -> the same numbers, ordered for `amx_linear`."""
        weight = weight.contiguous()
        packed = torch.empty_like(weight)
        self._library.amx_pack(
            packed.data_ptr(), weight.data_ptr(), *weight.shape, torch.get_num_threads()
        )
        return packed

    def amx_linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x: (rows, in_features), bias: (out_features,) fp32 -> (rows, out_features)."""
        x = x.contiguous()
        columns, depth = packed.shape
        out = x.new_empty(x.shape[0], columns)
        self._library.amx_linear(
            out.data_ptr(),
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            x.shape[0],
            columns,
            depth,
            torch.get_num_threads(),
        )
        return out

    def run_layers(self, x: int, residual: int, *structures: Any) -> None:
        """A whole stack of layers; `models.native_stack` makes the structures of stack.c."""
        arguments = [
            part if isinstance(part, int) else ctypes.addressof(part) for part in structures
        ]
        if not self._library.run_layers(x, residual, *arguments):
            raise MemoryError("no memory for the scratch of attention")


@cache
def cpu_kernels(dtype: torch.dtype) -> CpuKernels | None:
    """The kernels for tensors of this type, compiled if need be; None if there are none here."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if dtype not in _ELEMENTS or compiler is None or not env.cpu_kernels():
        return None
    flags = (*_COMPILE, _ELEMENTS[dtype])
    source = "".join(path.read_text() for path in _SOURCES)
    try:
        version = subprocess.check_output([compiler, "--version"], text=True, timeout=_LIMIT)
        # -march=native is this machine's; a home directory may be shared by several kinds.
        version += platform.machine() + cpu_name() + _cpu_flags()
        path = directory() / f"{key_of(source, (*flags, *_LINK), version)}.so"
        if not path.exists():
            _compile(compiler, flags, path)
        try:
            return CpuKernels(ctypes.CDLL(str(path)))
        except OSError:
            path.unlink()
            raise
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("no CPU kernels of our own, torch's are slower: %s", error)
        return None


def _cpu_flags() -> str:
    """What this processor can do, where Linux says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Put the library at `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [f"{folder}/{source.stem}.o" for source in _SOURCES]
        library = f"{folder}/kernels.so"
        commands = [
            [compiler, *flags, str(source), "-o", made]
            for source, made in zip(_SOURCES, objects, strict=True)
        ]
        for command in (*commands, [compiler, *objects, *_LINK, "-o", library]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
            if done.returncode:
                raise OSError(f"{' '.join(command)}: {done.stderr.strip()[:500]}")
        os.replace(library, path)
