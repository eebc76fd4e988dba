"""Owns how many CTAs fit on one Hopper SM: registers, shared memory, threads, and their granularity.

The limits are those of compute capability 9.0, H100 and H200 alike (CUDA C++ Programming Guide, table
of technical specifications); allocation granularity as in NVIDIA's occupancy calculator. A GPU test
compares with the driver's own cuOccupancy answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import KernelError
from octavo.kernels.matmul.quantization import ceil_div

WARP = 32
# Of one SM.
MAX_WARPS = 64
MAX_CTAS = 32
REGISTERS = 65_536  # of 32 bits
SMEM_BYTES = 228 * 1024
# Of one CTA, and of one thread.
MAX_THREADS_PER_CTA = 1024
MAX_SMEM_PER_CTA = 227 * 1024
SMEM_RESERVED_PER_CTA = 1024  # the system's own
MAX_REGISTERS_PER_THREAD = 255
# Given out in multiples of these.
REGISTER_UNIT = 256  # to a warp
WARP_UNIT = 4  # one for each sub-partition
SMEM_UNIT = 128  # to a CTA


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


def occupancy(threads: int, registers_per_thread: int, smem_bytes: int = 0) -> Occupancy:
    """Occupancy of a launch; `smem_bytes` is static plus dynamic shared memory of one CTA.

    Raises KernelError for what no launch can have: too many threads, registers or shared memory.
    """
    if not 1 <= threads <= MAX_THREADS_PER_CTA:
        raise KernelError(f"a CTA has 1 to {MAX_THREADS_PER_CTA} threads, not {threads}")
    if not 1 <= registers_per_thread <= MAX_REGISTERS_PER_THREAD:
        raise KernelError(f"no kernel has {registers_per_thread} registers a thread")
    if not 0 <= smem_bytes <= MAX_SMEM_PER_CTA:
        raise KernelError(f"a CTA has at most {MAX_SMEM_PER_CTA} bytes, not {smem_bytes}")
    warps = ceil_div(threads, WARP)
    units = ceil_div(registers_per_thread * WARP, REGISTER_UNIT)  # that a warp occupies
    warps_with_registers = REGISTERS // (units * REGISTER_UNIT)
    smem = ceil_div(smem_bytes + SMEM_RESERVED_PER_CTA, SMEM_UNIT) * SMEM_UNIT
    allowed = {
        "threads": MAX_WARPS // warps,
        "registers": warps_with_registers // WARP_UNIT * WARP_UNIT // warps,
        "shared memory": SMEM_BYTES // smem,
        "CTA slots": MAX_CTAS,
    }
    if allowed["registers"] == 0:
        raise KernelError(f"{threads} threads of {registers_per_thread} registers do not fit an SM")
    ctas = min(allowed.values())
    limiters = tuple(name for name, count in allowed.items() if count == ctas)
    return Occupancy(ctas, ctas * warps, ctas * warps / MAX_WARPS, allowed, limiters)
