"""Owns how many CTAs fit on one SM: registers, shared memory, threads, and their granularity.

The limits are those of compute capability 9.0 (CUDA C++ Programming Guide, table of technical
specifications per compute capability); allocation granularity as in NVIDIA's occupancy calculator.
A GPU test compares with the driver's own cuOccupancy answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.matmul.quantization import ceil_div

WARP = 32
WARPGROUP = 128


@dataclass(frozen=True)
class SmLimits:
    """Per-SM resources. Bytes of shared memory, 32-bit registers."""

    max_threads: int
    max_ctas: int
    registers: int
    max_registers_per_thread: int
    register_unit: int  # allocated per warp in multiples of this
    warp_unit: int  # one per sub-partition: warps are placed in multiples of this
    smem_bytes: int
    max_smem_per_cta: int
    smem_reserved_per_cta: int  # the system's own
    smem_unit: int
    max_threads_per_cta: int = 1024

    @property
    def max_warps(self) -> int:
        return self.max_threads // WARP


# H100 and H200 are the same SM.
HOPPER = SmLimits(
    max_threads=2048,
    max_ctas=32,
    registers=65_536,
    max_registers_per_thread=255,
    register_unit=256,
    warp_unit=4,
    smem_bytes=228 * 1024,
    max_smem_per_cta=227 * 1024,
    smem_reserved_per_cta=1024,
    smem_unit=128,
)


@dataclass(frozen=True)
class Occupancy:
    """How many CTAs of a kernel are resident on one SM, and which resource said so.

    `limits` holds the CTA count that each resource alone would allow; `limiters` those that are the
    smallest. `fraction` is resident warps over the SM's maximum. Low is not bad in itself: the
    Hopper rungs run one CTA an SM on purpose.
    """

    ctas_per_sm: int
    warps_per_sm: int
    fraction: float
    limits: dict[str, int]
    limiters: tuple[str, ...]


def registers_per_warp(registers_per_thread: int, limits: SmLimits = HOPPER) -> int:
    """Registers one warp occupies, rounded up to the allocation unit."""
    return ceil_div(registers_per_thread * WARP, limits.register_unit) * limits.register_unit


def occupancy(
    threads: int, registers_per_thread: int, smem_bytes: int = 0, limits: SmLimits = HOPPER
) -> Occupancy:
    """Occupancy of a launch; `smem_bytes` is static plus dynamic shared memory of one CTA.

    Raises ValueError for what no launch can have: too many threads, registers or shared memory.
    """
    if not 1 <= threads <= limits.max_threads_per_cta:
        raise ValueError(f"a CTA has 1 to {limits.max_threads_per_cta} threads, not {threads}")
    if not 1 <= registers_per_thread <= limits.max_registers_per_thread:
        raise ValueError(f"no kernel has {registers_per_thread} registers a thread")
    if not 0 <= smem_bytes <= limits.max_smem_per_cta:
        raise ValueError(f"a CTA has at most {limits.max_smem_per_cta} bytes, not {smem_bytes}")
    warps = ceil_div(threads, WARP)
    per_warp = registers_per_warp(registers_per_thread, limits)
    resident_warps = limits.registers // per_warp // limits.warp_unit * limits.warp_unit
    smem = smem_bytes + limits.smem_reserved_per_cta
    smem = ceil_div(smem, limits.smem_unit) * limits.smem_unit
    allowed = {
        "threads": limits.max_warps // warps,
        "registers": resident_warps // warps,
        "shared memory": limits.smem_bytes // smem,
        "CTA slots": limits.max_ctas,
    }
    if allowed["registers"] == 0:
        raise ValueError(f"{threads} threads of {registers_per_thread} registers do not fit an SM")
    ctas = min(allowed.values())
    limiters = tuple(name for name, count in allowed.items() if count == ctas)
    fraction = ctas * warps / limits.max_warps
    return Occupancy(ctas, ctas * warps, fraction, allowed, limiters)


def setmaxnreg_total(plan: list[tuple[int, int]]) -> int:
    """Registers held after `setmaxnreg`, for (warpgroups, registers a thread) pairs of one CTA.

    It must not exceed what the launch allocated, or the increase waits for ever. Raises ValueError
    for a count the instruction does not take (PTX ISA "setmaxnreg": 24 to 256 in steps of 8).
    """
    for groups, registers in plan:
        if groups < 1 or registers % 8 or not 24 <= registers <= 256:
            raise ValueError(f"setmaxnreg takes no {registers} on {groups} warpgroups")
    return sum(groups * WARPGROUP * registers for groups, registers in plan)
