"""A compiled kernel as something to call: loaded once a device, launched on torch's current stream.

Owns the load-before-capture rule: what a graph capture needs must have run once before it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from octavo.errors import KernelError
from octavo.kernels import cache, driver
from octavo.kernels.jit import SERIALIZED_WGMMA


@dataclass(frozen=True)
class LaunchShape:
    """Everything about a launch but its arguments: CTAs, threads, bytes; `cluster` CTAs along x."""

    grid: tuple[int, int, int]
    threads: int
    dynamic_smem: int = 0
    cluster: int = 1
    programmatic: bool = False


@dataclass
class Kernel:
    """One `__global__` function of one source. `load` before a capture; `launch` any time after."""

    source: str
    entry: str
    name: str = "kernel.cu"
    dynamic_smem: int = 0
    _functions: dict[int, c_void_p] = field(default_factory=dict, repr=False)

    def load(self, device: int) -> c_void_p:
        """Compiles (or finds in the cache) and loads for CUDA device `device`; idempotent."""
        if (found := self._functions.get(device)) is not None:
            return found
        if not torch.cuda.is_available():
            raise KernelError(f"{self.name}: no CUDA GPU is usable here")
        if torch.cuda.is_current_stream_capturing():
            raise KernelError(f"{self.name}: run it once before capturing it in a CUDA graph")
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) != (9, 0):
            raise KernelError(f"{self.name}: needs compute capability 9.0, not {major}.{minor}")
        compiled = cache.compile_cached(self.source, name=self.name)
        for warning in SERIALIZED_WGMMA:
            if warning in compiled.log:
                raise KernelError(f"{self.name}: ptxas serialised wgmma ({warning})")
        with driver.current(device):
            library = driver.load_library(compiled.cubin)
            function = driver.get_function(library, self.entry, self.dynamic_smem)
        self._functions[device] = function
        return function

    def launch(self, device: int, shape: LaunchShape, parameters: Any) -> None:
        """`parameters`: ctypes array of pointers to the arguments (see `pack`)."""
        function = self.load(device)
        with driver.current(device):
            driver.launch(_config(shape, _stream(device)), function, parameters)

    def resident_ctas(self, device: int, shape: LaunchShape) -> int:
        """CTAs that a persistent launch may use: one an SM, in clusters that all run at once.

        A chip whose SM count is no multiple of the cluster, GPC by GPC, holds fewer clusters than
        the division says, and one that has to wait for a second round would double the time.
        """
        if shape.cluster == 1:
            return sm_count(device)
        function = self.load(device)
        with driver.current(device):
            config = _config(shape, _stream(device))
            return driver.max_active_clusters(config, function) * shape.cluster


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=1024)
def _config(shape: LaunchShape, stream: int) -> driver.LaunchConfig:
    """The driver's form of a launch. Kept, since building it takes longer than the launch; never
    changed, since another thread may be launching with it."""
    attributes, count = driver.launch_attributes(shape.cluster, shape.programmatic)
    return driver.LaunchConfig(
        *shape.grid, shape.threads, 1, 1, shape.dynamic_smem, stream, attributes, count
    )


def pack(*arguments: Any) -> Any:
    """Pointers to ctypes values, in the form that the driver takes; keeps the values alive.

    A tensor is passed as its address.
    """
    values = [c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    array = (c_void_p * len(values))(*map(ctypes.addressof, values))
    array.values = values  # type: ignore[attr-defined]
    return array


def sm_count(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
