"""Owns the speed of light: device peaks at a clock, bytes and FLOPs of a GEMM, and the roofline.

Peaks are clock x SMs x FLOPs a clock, so they fall when the power limit lowers the clock; a claim
names the clock it is made at. Sizes follow D[M, N] = A[M, K] B[N, K]^T.
"""

from __future__ import annotations

from dataclasses import dataclass

# FLOPs (a multiply-add is 2) per clock and SM of compute capability 9.0, dense.
FLOPS_PER_CLOCK = {"fp32": 256, "tf32": 2048, "bf16": 4096, "fp16": 4096, "fp8": 8192}
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Device:
    """Data-sheet facts. Clocks in MHz: `spec_clock` is the one the data sheet's FLOP/s imply."""

    name: str
    num_sms: int
    spec_clock: int
    max_clock: int
    dram_bytes_per_s: float
    l2_bytes: int


H200 = Device("H200", 132, 1830, 1980, 4.8e12, 60 * 2**20)
H100_SXM = Device("H100 SXM", 132, 1830, 1980, 3.35e12, 50 * 2**20)
H100_PCIE = Device("H100 PCIe", 114, 1620, 1755, 2.0e12, 50 * 2**20)
DEVICES = {"h200": H200, "h100": H100_SXM, "h100-pcie": H100_PCIE}


def peak_flops(device: Device, dtype: str, clock_mhz: float | None = None) -> float:
    """FLOP/s at a clock (default: the data sheet's). Raises ValueError for an unknown dtype."""
    if dtype not in FLOPS_PER_CLOCK:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(FLOPS_PER_CLOCK)}")
    clock = device.spec_clock if clock_mhz is None else clock_mhz
    if not clock > 0:
        raise ValueError(f"a clock of {clock} MHz")
    return device.num_sms * FLOPS_PER_CLOCK[dtype] * clock * 1e6


def gemm_flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def gemm_bytes(m: int, n: int, k: int, *, element_bytes: int = 2, out_bytes: int = 2) -> int:
    """Compulsory DRAM traffic: A and B read once, D written once."""
    return element_bytes * (m * k + n * k) + out_bytes * m * n


def tile_intensity(block_m: int, block_n: int, *, element_bytes: int = 2) -> float:
    """FLOPs per byte that a tile fetches: why a larger output tile needs less of L2."""
    return 2 * block_m * block_n / ((block_m + block_n) * element_bytes)


@dataclass(frozen=True)
class Roofline:
    """A ceiling of two lines: `flops_per_s` flat, `bytes_per_s` times intensity sloped."""

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.bytes_per_s > 0):
            raise ValueError("both ceilings must be positive")

    @property
    def ridge_point(self) -> float:
        """FLOP/byte from which on a kernel can be compute-bound."""
        return self.flops_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """FLOP/s a kernel of this intensity can reach."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def seconds(self, flops: float, traffic_bytes: float) -> float:
        """Least time for this much work when compute and traffic overlap fully."""
        return max(flops / self.flops_per_s, traffic_bytes / self.bytes_per_s)

    def limiter(self, intensity: float) -> str:
        """ "memory" or "compute"."""
        return "memory" if intensity < self.ridge_point else "compute"


def device_roofline(device: Device, dtype: str, clock_mhz: float | None = None) -> Roofline:
    return Roofline(peak_flops(device, dtype, clock_mhz), device.dram_bytes_per_s)
