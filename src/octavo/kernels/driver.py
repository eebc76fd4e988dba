"""The few CUDA driver calls that we need, through ctypes: load machine code, launch, encode TMA maps.

ctypes because the layout and alignment of what the driver reads must be ours (cuda-bindings hands
out CUtensorMap objects on 16-byte boundaries; the driver wants 64), and because probing for libcuda
this way fails at once on a machine without a driver. Structures follow cuda.h of CUDA 12.0 and later.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, Union, byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from octavo.errors import KernelError

_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SMEM = 8  # CUfunction_attribute
_BFLOAT16 = 9  # CUtensorMapDataType
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3


class _Dim3(Structure):
    _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]


class _AttributeValue(Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("cluster", _Dim3), ("flag", c_int)]


class LaunchAttribute(Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", _AttributeValue)]


class LaunchConfig(Structure):
    _fields_ = [
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, c_uint) for name in ("block_x", "block_y", "block_z")),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("attribute_count", c_uint),
    ]


@cache
def _libcuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"no NVIDIA driver on this machine (libcuda.so.1): {error}") from error
    status = library.cuInit(0)
    if status:
        raise KernelError(f"the NVIDIA driver finds no usable GPU: {_error_name(library, status)}")
    return library


def _error_name(library: ctypes.CDLL, status: int) -> str:
    name = c_char_p()
    library.cuGetErrorName(status, byref(name))
    return f"{name.value.decode() if name.value else 'unknown'} ({status})"


def call(function: str, *arguments: Any) -> None:
    """Calls a driver function; a status other than CUDA_SUCCESS is a KernelError that names it."""
    library = _libcuda()
    status = getattr(library, function)(*arguments)
    if status:
        raise KernelError(f"{function}: {_error_name(library, status)}")


@cache
def primary_context(device: int) -> c_void_p:
    """The context that torch uses, too; kept for good."""
    handle, context = c_int(), c_void_p()
    call("cuDeviceGet", byref(handle), c_int(device))
    call("cuDevicePrimaryCtxRetain", byref(context), handle)
    return context


class current:  # in lower case, for it is used as a function is
    """Makes a device's context this thread's, which may have none yet, or another device's."""

    def __init__(self, device: int) -> None:
        self._context = primary_context(device)

    def __enter__(self) -> None:
        call("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *_: object) -> None:
        call("cuCtxPopCurrent_v2", byref(c_void_p()))


def load_library(cubin: bytes) -> c_void_p:
    """Loads machine code for every context of this process. Not allowed while a graph is captured."""
    library = c_void_p()
    call("cuLibraryLoadData", byref(library), cubin, None, None, c_uint(0), None, None, c_uint(0))
    return library


def get_function(library: c_void_p, name: str, dynamic_smem: int) -> c_void_p:
    """The CUfunction of a kernel in the current context, allowed `dynamic_smem` bytes a CTA."""
    kernel, function = c_void_p(), c_void_p()
    call("cuLibraryGetKernel", byref(kernel), library, name.encode())
    call("cuKernelGetFunction", byref(function), kernel)
    if dynamic_smem > 48 * 1024:
        call("cuFuncSetAttribute", function, c_int(_MAX_DYNAMIC_SMEM), c_int(dynamic_smem))
    return function


def launch_attributes(cluster: int, programmatic: bool) -> tuple[Any, int]:
    """An attribute array for `LaunchConfig` and its length; `cluster` CTAs along x."""
    found = []
    if cluster > 1:
        value = _AttributeValue(cluster=_Dim3(cluster, 1, 1))
        found.append(LaunchAttribute(_CLUSTER_DIMENSION, 0, value))
    if programmatic:
        value = _AttributeValue(flag=1)
        found.append(LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, value))
    return (LaunchAttribute * 2)(*found), len(found)


def launch(config: LaunchConfig, function: c_void_p, parameters: Any) -> None:
    """`parameters`: ctypes array of pointers to the arguments, kept alive by the caller."""
    call("cuLaunchKernelEx", byref(config), function, parameters, None)


def max_active_clusters(config: LaunchConfig, function: c_void_p) -> int:
    """How many clusters of this launch the device holds at one time."""
    count = c_int()
    call("cuOccupancyMaxActiveClusters", byref(count), function, byref(config))
    return count.value


def device_attribute(device: int, attribute: int) -> int:
    """A CUdevice_attribute by its number in cuda.h."""
    value, handle = c_int(), c_int()
    call("cuDeviceGet", byref(handle), c_int(device))
    call("cuDeviceGetAttribute", byref(value), c_int(attribute), handle)
    return value.value


def encode_tensor_map(
    target: int, address: int, *, rows: int, cols: int, row_bytes: int, box_rows: int
) -> None:
    """Writes the CUtensorMap of a row-major bf16 matrix to host address `target` (a multiple of 64).

    `cols` are contiguous; `row_bytes` is a multiple of 16; the box is `box_rows` x 64, at most 256
    rows, which are 128 bytes wide for the 128-byte swizzle. Outside reads as zero.
    """
    matrix = c_void_p(address), (c_uint64 * 2)(cols, rows), (c_uint64 * 1)(row_bytes)
    box = (c_uint * 2)(64, box_rows), (c_uint * 2)(1, 1)
    modes = map(c_int, (0, _SWIZZLE_128B, _L2_PROMOTION_256B, 0))
    kind = c_int(_BFLOAT16), c_uint(2)
    call("cuTensorMapEncodeTiled", c_void_p(target), *kind, *matrix, *box, *modes)
