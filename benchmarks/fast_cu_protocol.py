"""Rung 22 beside cuBLAS by the protocol of fast.cu (github.com/pranjalssh/fast.cu, matmul.cu, 38eb642).

A sample: rest; zero both outputs from the host; launch cuBLAS and the arm once; copy both products to
the host; time 8 plain launches on the default stream between two events. Operands are one set of
normal(0, 1); cuBLAS is cublasGemmEx with its own handle. Mode "idle" is that: the GPU waits for the
first launch within the timing. Mode "queued" follows at once, behind an untimed launch, as in the
ladder. Unlike fast.cu: arms alternate, products are compared after the timing, the rest is shorter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from ctypes import CDLL, byref, c_float, c_int, c_void_p
from functools import partial
from pathlib import Path

import torch

from octavo.bench.provenance import describe
from octavo.kernels.matmul import host
from octavo.kernels.matmul.registry import rung

SIZES, MODES, LAUNCHES = (4096, 8192), ("idle", "queued"), 8
CUBLAS, OURS = "cublas", rung(22)
ARMS = (CUBLAS, OURS.name)
NORM_LIMIT = 2.5e-3  # of the difference to cuBLAS, as in bench/correctness.py
OP_N, OP_T, BF16, COMPUTE_32F, DEFAULT_ALGORITHM = 0, 1, 14, 68, -1  # cublas_api.h, library_types.h


def checked(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS: status {status}")


def open_cublas() -> tuple[Callable[..., object], int]:
    """cublasGemmEx of the library that torch has loaded, on a new handle; and its version."""
    library = CDLL(f"libcublas.so.{str(torch.version.cuda).split('.')[0]}")
    handle, version = c_void_p(), c_int()
    checked(library.cublasCreate_v2(byref(handle)))
    checked(library.cublasGetVersion_v2(handle, byref(version)))
    library.cublasGemmEx.restype = checked
    return partial(library.cublasGemmEx, handle), version.value


def cublas_arm(gemm: Callable[..., object], *tensors: torch.Tensor) -> Callable[[], object]:
    """out = a b^T of square row-major (a, b, out), which column-major reads out^T = b a^T."""
    size = len(tensors[0])
    a, b, out = ((c_void_p(tensor.data_ptr()), BF16, size) for tensor in tensors)
    scaled = (byref(c_float(1)), *b, *a, byref(c_float(0)), *out)
    return partial(gemm, OP_T, OP_N, size, size, size, *scaled, COMPUTE_32F, DEFAULT_ALGORITHM)


class Square:
    """Operands and arms of one size. `samples`: us a launch by (arm, mode), and (arm, "error")."""

    def __init__(self, gemm: Callable[..., object], size: int) -> None:
        tensors = torch.randn(4, size, size, device="cuda", dtype=torch.bfloat16)
        (a, b, out, reference), self.products = tensors, tensors[2:]
        self.host = torch.empty(self.products.shape, dtype=torch.bfloat16)
        ours = host.prepare(OURS, a, b, out)  # once: fast.cu keeps its tensor maps, too
        self.arms = {CUBLAS: cublas_arm(gemm, a, b, out)}
        self.arms[OURS.name] = partial(ours.kernel.launch, 0, ours.shape, ours.parameters)
        self.refer = cublas_arm(gemm, a, b, reference)
        self.samples = {(arm, key): list[float]() for arm in ARMS for key in (*MODES, "error")}

    def sample(self, name: str, rest: float) -> None:
        arm = self.arms[name]
        time.sleep(rest)
        self.products.copy_(self.host.zero_())
        self.refer()
        arm()
        torch.cuda.synchronize()
        self.host.copy_(self.products)
        for mode in MODES:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if mode == "queued":
                arm()
            start.record()
            for _ in range(LAUNCHES):
                arm()
            end.record()
            end.synchronize()
            self.samples[name, mode].append(start.elapsed_time(end) * 1000 / LAUNCHES)
        product, reference = self.products.float()
        self.samples[name, "error"].append(float(torch.dist(product, reference) / reference.norm()))

    def row(self, name: str, mode: str) -> dict[str, object]:
        samples, errors = self.samples[name, mode], self.samples[name, "error"]
        size, median = self.products.shape[-1], statistics.median(samples)
        ratio = statistics.median(self.samples[CUBLAS, mode]) / median
        rates = {"median_us": median, "tflops": 2e-6 * size**3 / median, "vs_cublas": ratio}
        checks = {"error": max(errors), "ok": all(error <= NORM_LIMIT for error in errors)}
        return {"rung": name, "size": size, "mode": mode, **rates, **checks, "samples_us": samples}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest", type=float, default=0.75, help="seconds; fast.cu: 5")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    gemm, version = open_cublas()
    squares = [Square(gemm, size) for size in SIZES]
    for number in range(args.rounds):
        for square in squares:
            for name in ARMS[:: (-1) ** number]:
                square.sample(name, args.rest)
    rows = [square.row(name, mode) for square in squares for name in ARMS for mode in MODES]
    where = describe() | {"cublas": version, "rounds": args.rounds, "rest_s": args.rest}
    args.out.write_text(json.dumps({"environment": where, "results": rows}, indent=1) + "\n")
    print(*rows, sep="\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
