"""Every rung of the ladder beside cuBLAS in one run: checked first, then timed, as one JSON document.

bf16 rungs are timed twice: cool (short bursts after idling, as kernel papers do) and under sustained
load, where the power limit sets the clock. fp32 rungs are timed against cuBLAS with TF32 off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from octavo.bench import correctness, provenance, timer
from octavo.bench.clocks import ClockSampler
from octavo.errors import KernelError
from octavo.kernels import ops
from octavo.kernels.launch import Kernel, LaunchShape, pack, sm_count
from octavo.kernels.matmul.registry import RUNGS, Rung

CUBLAS = "cublas"
_SLOW_RUNGS = 6  # below this number one launch takes long enough to be timed alone
_COOL_LAUNCHES = 8  # a burst short enough that the power limit has not caught it
_COOL_PAUSE = 0.5  # seconds before each of them
_SAMPLE_US = 50_000.0


def run_ladder(
    sizes: Sequence[int] = (4096, 8192),
    rungs: Iterable[Rung] = RUNGS,
    *,
    modes: Sequence[str] = ("cool", "sustained"),
    rounds: int = 7,
    fp32_sizes: Sequence[int] = (4096,),
) -> dict[str, Any]:
    """Checks and times rungs on square problems of edge `sizes`, printing each result.

    Raises KernelError without a GPU. Returns {"environment", "ilp", "results"}; each result has
    rung (a name or "cublas"), dtype, m, n, k, mode, median_us, low_us, high_us, tflops, vs_cublas
    and ok (checked right).
    """
    if not torch.cuda.is_available():
        raise KernelError("timing the ladder needs a CUDA GPU, and this machine shows none")
    chosen = list(rungs)
    document: dict[str, Any] = {"environment": provenance.describe(), "results": []}
    document["ilp"] = [time_ilp(rung) for rung in chosen if rung.kind == "ilp"]
    fp32 = [r for r in chosen if r.kind == "matmul" and r.dtype == "fp32"]
    bf16 = [r for r in chosen if r.dtype == "bf16"]
    jobs = [(bf16, size, mode) for mode in modes for size in sizes]
    for group, size, mode in jobs + [(fp32, size, "sustained") for size in fp32_sizes]:
        if group:
            document["results"] += time_square(group, size, mode, rounds)
    return document


def time_square(rungs: Sequence[Rung], size: int, mode: str, rounds: int) -> list[dict[str, Any]]:
    """All `rungs` (one dtype) and cuBLAS at M = N = K = `size`, interleaved; see `run_ladder`."""
    dtype, flops = rungs[0].dtype, 2.0 * size**3
    sets = _operand_sets(dtype, size)
    verdicts = {rung.name: correctness.run_and_compare(rung, sets[0]) for rung in rungs}
    slow = {r.name: _calls(r, sets) for r in rungs if r.number < _SLOW_RUNGS}
    fast = {r.name: _calls(r, sets) for r in rungs if r.number >= _SLOW_RUNGS}
    torch.backends.cuda.matmul.allow_tf32 = False
    rights = [each.b.t() if dtype == "bf16" else each.b for each in sets]
    both = zip(sets, rights, strict=True)
    fast[CUBLAS] = [partial(torch.mm, each.a, right, out=each.out) for each, right in both]
    sustained = mode == "sustained"
    launches, pause = _COOL_LAUNCHES, _COOL_PAUSE
    if sustained:
        pause = 0.0
        rate = 40e6 if slow else 700e6  # FLOP/us that the fast arms are near
        launches = max(4, min(200, round(_SAMPLE_US * rate / flops)))
    with ClockSampler() as clocks:
        if sustained:
            timer.hold_load(fast[CUBLAS][0], 1.0)
        pace: dict[str, Any] = {"launches": launches, "rounds": rounds, "settle": sustained}
        timings = timer.compare(fast, pause=pause, **pace)
        if slow:  # alone: each takes longer than the others' whole sample
            timings |= timer.compare(slow, launches=1, rounds=3, pause=pause)
    results: list[dict[str, Any]] = []
    for name in sorted(timings):  # ladder order, then cuBLAS
        timing, verdict = timings[name], verdicts.get(name)
        row = {
            "rung": name,
            "dtype": dtype,
            **dict.fromkeys(("m", "n", "k"), size),
            "mode": mode,
            **asdict(timing),
            "tflops": flops / timing.median_us / 1e6,
            "vs_cublas": timings[CUBLAS].median_us / timing.median_us,
            "ok": verdict is None or verdict.ok,
            "relative_norm": None if verdict is None else verdict.relative_norm,
        }
        results.append(row)
        spread = (timing.high_us - timing.low_us) / timing.median_us
        print(
            f"{name:24s} {dtype} {size} {mode:9s} {timing.median_us:10.1f} us "
            f"{row['tflops']:7.1f} TFLOP/s {row['vs_cublas']:6.3f} x cuBLAS "
            f"spread {spread:.3f} {'ok' if row['ok'] else 'WRONG'}"
        )
    results[-1]["clocks"] = clocks.summary()
    print(f"clocks {dtype} {size} {mode}: {results[-1]['clocks']}")
    return results


def _operand_sets(dtype: str, size: int) -> list[correctness.Problem]:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    sets: list[correctness.Problem] = []
    for _ in range(timer.rotation_count(3 * size * size * kind.itemsize)):
        a, b, out = (torch.randn(size, size, device="cuda", dtype=kind) for _ in range(3))
        sets.append(correctness.Problem(a, b, out, out.view(-1)))
    return sets


def _calls(rung: Rung, sets: Sequence[correctness.Problem]) -> list[timer.Call]:
    return [partial(ops.matmul, rung, each.a, each.b, each.out) for each in sets]


def time_ilp(rung: Rung, iterations: int = 4096) -> dict[str, Any]:
    """Rung 00: TFLOP/s of the dependent and of the independent chains, one warp a scheduler."""
    ctas = sm_count(0)
    out = torch.empty(ctas * rung.threads, device="cuda")
    flops = 2.0 * out.numel() * iterations * rung.constants["FMAS"]
    shape = LaunchShape((ctas, 1, 1), rung.threads)
    arguments = pack(out, c_float(0.999), c_float(0.001), c_int(iterations))
    arms: dict[str, list[timer.Call]] = {}
    for entry in ("ilp_dependent", "ilp_independent"):
        kernel = Kernel(rung.source, entry, name=rung.path.name)
        arms[entry] = [partial(kernel.launch, 0, shape, arguments)]
    timings = timer.compare(arms, launches=4, rounds=5)
    rates = {name: flops / timing.median_us / 1e6 for name, timing in timings.items()}
    return {
        "rung": rung.name,
        "tflops": rates,
        "ratio": rates["ilp_independent"] / rates["ilp_dependent"],
        "timings": {name: asdict(timing) for name, timing in timings.items()},
    }
