"""The host side of the ladder: checks operands, packs kernel arguments, launches a rung.

Everything that a launch needs is computed once for each set of operands and kept, so a repeated
call costs a dictionary look-up and one driver call, and nothing is copied or compiled during a
CUDA graph capture. Tensor maps are keyed by address, shape and strides of every operand.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_char, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from octavo.errors import KernelError
from octavo.kernels import driver
from octavo.kernels.launch import Kernel, LaunchShape, pack
from octavo.kernels.matmul.quantization import ceil_div
from octavo.kernels.matmul.registry import RUNGS, Rung
from octavo.kernels.matmul.schedule import hilbert_order

MAX_GRID_Y = 65_535
MAX_EXTENT = 2**31 - 256  # kernels round up to a tile, and count on to the next one, in 32 bits
MAX_TILES = 1 << 15  # a tile coordinate has 15 bits in an order table
_MAX_KEPT_CALLS = 256
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class GemmArgs(Structure):
    """Mirror of GemmArgs in common/types.cuh; the maps are encoded in place, so align to 128."""

    _fields_ = [
        *((name, c_char * 128) for name in ("map_a", "map_b", "map_c")),
        ("out", c_void_p),
        ("ldc", c_int64),
        ("order", c_void_p),
        *((name, c_int) for name in ("m", "n", "k", "tma_store")),
        ("pad", c_char * 88),
    ]

    @classmethod
    def aligned(cls) -> GemmArgs:
        buffer = (c_char * (ctypes.sizeof(cls) + 128))()
        offset = -ctypes.addressof(buffer) % 128
        return cls.from_buffer(buffer, offset)


@dataclass(frozen=True)
class PreparedCall:
    """One launch, ready: kernel, launch shape, and packed arguments, which `pack` keeps alive."""

    kernel: Kernel
    shape: LaunchShape
    parameters: Any


_calls: dict[tuple[object, ...], PreparedCall] = {}
_by_number = {rung.number: rung for rung in RUNGS if rung.kind == "matmul"}


@cache
def kernel_of(rung: Rung) -> Kernel:
    return Kernel(rung.source, rung.entry, rung.path.name, rung.dynamic_smem)


def run(number: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b (fp32 rungs, b: (K, N)) or a @ b.T (bf16 rungs, b: (N, K)), on a's stream.

    a: (M, K), out: (M, N). Raises KernelError before any launch for an operand it can't take.
    """
    key = (number, *_identity(a), *_identity(b), *_identity(out))
    call = _calls.get(key)
    if call is None:
        check_operands(_rung(number), a, b, out)
        if out.numel() == 0:
            return
        call = prepare(_rung(number), a, b, out)
        _calls[key] = call
        while len(_calls) > _MAX_KEPT_CALLS:
            _calls.pop(list(_calls)[0], None)  # noqa: RUF015 (other threads may be adding)
    call.kernel.launch(a.device.index, call.shape, call.parameters)


def _rung(number: int) -> Rung:
    if number not in _by_number:
        raise KernelError(f"there is no matmul rung {number}; there are {sorted(_by_number)}")
    return _by_number[number]


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


def prepare(rung: Rung, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> PreparedCall:
    """Packs one launch of operands that `check_operands` has accepted; out is not empty."""
    (m, k), n = a.shape, out.shape[1]
    device = a.device.index
    kernel = kernel_of(rung)
    kernel.load(device)
    smem, early = rung.dynamic_smem, bool(rung.constants.get("PROGRAMMATIC", 0))
    shape = LaunchShape((rung.cluster, 1, 1), rung.threads, smem, rung.cluster, programmatic=early)
    resident = kernel.resident_ctas(device, shape)
    shape = replace(shape, grid=grid_of(rung, m, n, resident))
    if rung.dtype == "fp32":
        return PreparedCall(kernel, shape, pack(c_int(m), c_int(n), c_int(k), a, b, out))
    return PreparedCall(kernel, shape, pack(_gemm_args(rung, a, b, out)))


def grid_of(rung: Rung, m: int, n: int, resident: int) -> tuple[int, int, int]:
    """CTAs of a launch: one a tile; for persistent rungs the fewest that finish in as many rounds.

    With 2048 tiles 132 SMs need 16 rounds, and so do 128, all busy to the end: under a power limit
    that is the faster way (+0.7% at 4096^3, +1.1% at 8192^3 for bf16 on an H200).
    """
    tiles_m, tiles_n = ceil_div(m, rung.block_m), ceil_div(n, rung.block_n)
    if not rung.persistent:
        if tiles_m > MAX_GRID_Y:
            raise KernelError(f"rung {rung.name}: M={m} needs more than {MAX_GRID_Y} tile rows")
        return tiles_n, tiles_m, 1
    clusters_m, clusters_n = cluster_tiles(rung, m, n)
    work = clusters_m * clusters_n
    rounds = ceil_div(work * rung.cluster, max(resident, 1))
    return ceil_div(work, max(rounds, 1)) * rung.cluster, 1, 1


def cluster_tiles(rung: Rung, m: int, n: int) -> tuple[int, int]:
    """The output in units of one cluster's tiles, rows then columns."""
    return ceil_div(m, rung.block_m * rung.cluster), ceil_div(n, rung.block_n)


def check_operands(rung: Rung, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Raises KernelError naming the operand and what is wrong with it."""
    dtype, where = _DTYPES[rung.dtype], f"rung {rung.name}"
    operands = {"a": a, "b": b, "out": out}
    for name, tensor in operands.items():
        if tensor.dim() != 2:
            raise KernelError(f"{where}: {name} has {tensor.dim()} dimensions, not 2")
        if tensor.dtype != dtype:
            raise KernelError(f"{where}: {name} is {tensor.dtype}, not {dtype}")
        if not tensor.is_cuda or tensor.device != a.device:
            raise KernelError(f"{where}: {name} is on {tensor.device}; all need one CUDA device")
    m, k = a.shape
    n, b_k = b.shape[::-1] if rung.dtype == "fp32" else b.shape
    if b_k != k:
        raise KernelError(f"{where}: a is {tuple(a.shape)} and b {tuple(b.shape)}: K differs")
    if tuple(out.shape) != (m, n):
        raise KernelError(f"{where}: out is {tuple(out.shape)}, not {(m, n)}")
    if k < 8 or k % 8:
        raise KernelError(f"{where}: K={k} is not a positive multiple of 8")
    if max(m, n, k) >= MAX_EXTENT:
        raise KernelError(f"{where}: an extent of {MAX_EXTENT} or more in {(m, n, k)}")
    for name, tensor in operands.items():
        _check_layout(f"{where}: {name}", tensor, row_step=1 if name == "out" else 8)


def _check_layout(what: str, tensor: torch.Tensor, *, row_step: int) -> None:
    """fp32 operands are contiguous; bf16 ones may have longer rows, TMA operands of 16-byte steps."""
    if tensor.data_ptr() % 16:
        raise KernelError(f"{what} starts at an address that is not a multiple of 16 bytes")
    if tensor.dtype == torch.float32:
        if not tensor.is_contiguous():
            raise KernelError(f"{what} has strides {tensor.stride()}; it must be contiguous")
        return
    rows, cols = tensor.shape
    if cols > 1 and tensor.stride(1) != 1:
        raise KernelError(f"{what} has strides {tensor.stride()}; columns must be contiguous")
    if rows > 1 and tensor.stride(0) < cols:
        raise KernelError(f"{what} has overlapping rows: strides {tensor.stride()}")
    if rows > 1 and tensor.stride(0) % row_step:
        raise KernelError(f"{what} has a row stride of {tensor.stride(0)}, not a multiple of 8")


def _gemm_args(rung: Rung, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> GemmArgs:
    args = GemmArgs.aligned()
    base = ctypes.addressof(args)
    (m, k), n = a.shape, out.shape[1]
    args.out, args.ldc = out.data_ptr(), out.stride(0) if m > 1 else n
    args.m, args.n, args.k = m, n, k
    # TMA writes whole 16-byte pieces: a ragged row end would spill into whatever follows it.
    args.tma_store = int(n % 8 == 0 and args.ldc % 8 == 0)
    _encode(base, a, rung.block_m)
    _encode(base + 128, b, rung.constants.get("B_BOX_ROWS", rung.block_n))
    if args.tma_store:
        _encode(base + 256, out, 64)
    if rung.constants.get("HILBERT"):
        args.order = order_table(a.device.index, *cluster_tiles(rung, m, n)).data_ptr()
    return args


def _encode(target: int, tensor: torch.Tensor, box_rows: int) -> None:
    rows, cols = tensor.shape
    stride = tensor.stride(0) if rows > 1 else ceil_div(cols, 8) * 8
    size = {"rows": rows, "cols": cols, "row_bytes": stride * tensor.element_size()}
    driver.encode_tensor_map(target, tensor.data_ptr(), **size, box_rows=box_rows)


@cache  # never dropped: a call or a captured CUDA graph may hold its address; 4 bytes a tile
def order_table(device: int, tiles_m: int, tiles_n: int) -> torch.Tensor:
    """Hilbert order of a tile grid as int32 (tiles,) on the device, m << 16 | n each."""
    if torch.cuda.is_current_stream_capturing():
        raise KernelError("run this shape once before capturing it in a CUDA graph")
    if max(tiles_m, tiles_n) >= MAX_TILES:
        raise KernelError(f"{tiles_m} x {tiles_n} tiles: at most {MAX_TILES - 1} a side")
    packed = [tile_m << 16 | tile_n for tile_m, tile_n in hilbert_order(tiles_m, tiles_n)]
    return torch.tensor(packed, dtype=torch.int32, device=f"cuda:{device}")
