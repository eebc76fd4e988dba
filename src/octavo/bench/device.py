"""This GPU's memory hierarchy and speed of light, measured: what the ladder's limiters refer to.

Owns the meaning of the kernels in kernels/matmul/device/memory.cu. Latencies are pointer chases in
SM cycles, bandwidths are bytes counted over graph-replay time.
"""

from __future__ import annotations

import statistics
from ctypes import c_int, c_int64
from functools import partial
from typing import Any

import torch

from octavo.bench import provenance, timer
from octavo.bench.clocks import ClockSampler
from octavo.errors import KernelError
from octavo.kernels import driver, ops
from octavo.kernels.jit import MATMUL_DIR
from octavo.kernels.launch import Kernel, LaunchShape, pack, sm_count
from octavo.kernels.matmul.registry import RUNGS

_SOURCE = (MATMUL_DIR / "device" / "memory.cu").read_text("utf-8")
STRIDES = (1, 2, 4, 8, 16, 32)  # words of 4 bytes between the lanes of a warp
CONFLICT_STRIDES = (0, 1, 2, 4, 8, 16, 32)  # 0: every lane reads the same word
_GIB = 1 << 30


def measure_device() -> dict[str, Any]:
    """All microbenchmarks, as one JSON-able document. Raises KernelError without a GPU.

    Keys: environment; sizes (bytes, counts); bandwidth_gbs (copy, read, l2_read, smem_read);
    strided_read (stride in words -> useful and moved GB/s); latency_cycles (smem, dsmem, l1, l2,
    dram); smem_cycles_per_load (ways -> cycles of a warp-wide 4-byte load; "broadcast");
    tensor_core (random, zeros -> tflops, clocks).
    """
    if not torch.cuda.is_available():
        raise KernelError("measuring a device needs a CUDA GPU, and this machine shows none")
    return {
        "environment": provenance.describe(),
        "sizes": device_sizes(),
        "bandwidth_gbs": bandwidths(),
        "strided_read": strided_reads(),
        "latency_cycles": latencies(),
        "smem_cycles_per_load": bank_conflicts(),
        "tensor_core": tensor_core_load(),
    }


# CUdevice_attribute numbers of cuda.h.
_ATTRIBUTES = {
    "sms": 16, "threads_per_sm": 39, "registers_per_sm": 82, "smem_bytes_per_sm": 81,
    "smem_bytes_per_cta": 97, "l2_bytes": 38, "sm_clock_khz": 13, "memory_clock_khz": 36,
    "memory_bus_bits": 37,
}  # fmt: skip


def device_sizes() -> dict[str, int]:
    """What the driver says: counts, bytes, and the highest clocks in kHz."""
    sizes = {name: driver.device_attribute(0, number) for name, number in _ATTRIBUTES.items()}
    return {**sizes, "memory_bytes": int(torch.cuda.get_device_properties(0).total_memory)}


def _launcher(entry: str, shape: LaunchShape, *arguments: Any) -> timer.Call:
    kernel = Kernel(_SOURCE, entry, name="memory.cu")
    return partial(kernel.launch, 0, shape, pack(*arguments))


def _seconds(call: timer.Call, launches: int = 4, rounds: int = 5) -> float:
    timing = timer.compare({"arm": [call]}, launches=launches, rounds=rounds)["arm"]
    return timing.median_us / 1e6


def _counter(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """One number, where kernels leave what they found."""
    return torch.zeros(1, dtype=dtype, device="cuda")


def bandwidths() -> dict[str, float]:
    """GB/s: memory copy (bytes read plus written) and read, L2 read, shared-memory read (all SMs)."""
    sms, sink = sm_count(0), _counter()
    source = torch.empty(2 * _GIB, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    grid = LaunchShape((sms * 8, 1, 1), 256)
    count = c_int64(source.numel() // 16)
    copy = _launcher("copy", grid, source, target, count)
    read = _launcher("read", grid, source, sink, count)
    # 16 MiB stay in the L2; every launch but the first finds them there.
    small = source[: 16 << 20]
    l2 = _launcher("read", grid, small, sink, c_int64(small.numel() // 16))
    steps = 4096
    smem = _launcher("shared_bandwidth", LaunchShape((sms * 2, 1, 1), 1024), sink, c_int(steps))
    smem_bytes = sms * 2 * 1024 * 8 * 16 * steps
    return {
        "copy": 2 * source.numel() / _seconds(copy) / 1e9,
        "read": source.numel() / _seconds(read) / 1e9,
        "l2_read": small.numel() / _seconds(l2, launches=64) / 1e9,
        "smem_read": smem_bytes / _seconds(smem) / 1e9,
    }


def strided_reads() -> dict[int, dict[str, float]]:
    """GB/s of a 2 GiB buffer read one word in `stride`: useful bytes, and bytes moved in sectors."""
    sink = _counter()
    source = torch.empty(_GIB // 2, dtype=torch.int32, device="cuda").random_()
    shape = LaunchShape((sm_count(0) * 16, 1, 1), 256)
    found: dict[int, dict[str, float]] = {}
    for stride in STRIDES:
        numbers = c_int64(source.numel()), c_int(stride)
        seconds = _seconds(_launcher("read_strided", shape, source, sink, *numbers))
        words = -(-source.numel() // stride)
        moved = 4 * words * min(stride, 8)  # a 32-byte sector holds 8 words
        found[stride] = {"useful": 4 * words / seconds / 1e9, "moved": moved / seconds / 1e9}
    return found


def latencies(steps: int = 20_000) -> dict[str, float]:
    """Cycles from one dependent load to the next, for each level that a load can be served from."""
    one, pair = LaunchShape((1, 1, 1), 1), LaunchShape((2, 1, 1), 32, cluster=2)
    cycles = _counter(torch.int64)
    tail = _counter(), cycles, c_int(steps)
    rings = [_random_ring(size) for size in (16 << 10, 8 << 20, 4 * _GIB)]
    calls = {
        "smem": _launcher("chase_shared", one, *tail),
        "dsmem": _launcher("chase_dsmem", pair, *tail),
        "l1": _launcher("chase_l1", one, rings[0], *tail),
        "l2": _launcher("chase_global", one, rings[1], *tail),
        "dram": _launcher("chase_global", one, rings[2], *tail),
    }
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    found: dict[str, float] = {}
    for level, call in calls.items():
        samples = []
        for _ in range(3):
            if level == "dram":
                flush.zero_()  # the lines of the last walk are in the L2
            call()
            samples.append(int(cycles.item()) / steps)
        found[level] = statistics.median(samples)
    return found


def _random_ring(size: int, line: int = 128) -> torch.Tensor:
    """int32 buffer of `size` bytes: a random cycle over its 128-byte lines, one pointer a line."""
    words = line // 4
    order = torch.randperm(size // line, device="cuda")
    ring = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
    # Start at 0: rotate the permutation so that the walk begins where the kernels begin.
    order = torch.roll(order, -int((order == 0).nonzero().item()))
    ring[order * words] = (torch.roll(order, -1) * words).to(torch.int32)
    return ring


def bank_conflicts(steps: int = 1000) -> dict[str, float]:
    """Cycles of a warp-wide 4-byte shared load by how many lanes meet in a bank: "1", "2" .. "32"."""
    sink, cycles = _counter(), _counter(torch.int64)
    warp = LaunchShape((1, 1, 1), 32)
    found: dict[str, float] = {}
    for stride in CONFLICT_STRIDES:
        call = _launcher("shared_banks", warp, sink, cycles, c_int(stride), c_int(steps))
        call()
        call()
        found[str(stride) if stride else "broadcast"] = int(cycles.item()) / (8 * steps)
    return found


def tensor_core_load(size: int = 8192, seconds: float = 1.5) -> dict[str, dict[str, Any]]:
    """The best rung under load on random and on zero inputs: TFLOP/s, and clock and power held.

    Zeros toggle no wires: the same work takes less power, so the chip clocks higher. That is why
    nothing here is ever timed on zeros.
    """
    best = RUNGS[-1]
    found: dict[str, dict[str, Any]] = {}
    for label in ("random", "zeros"):
        a, b, out = (torch.zeros(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        if label == "random":
            a.normal_()
            b.normal_()
        call = partial(ops.matmul, best, a, b, out)
        timer.hold_load(call, seconds)
        with ClockSampler() as clocks:
            tflops = 2.0 * size**3 / _seconds(call, launches=32, rounds=9) / 1e12
        found[label] = {"rung": best.name, "tflops": tflops, **clocks.summary()}
    return found
