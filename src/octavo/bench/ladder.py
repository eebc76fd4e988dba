"""Every rung of the ladder beside cuBLAS in one run: checked first, then timed, as one JSON document.

bf16 rungs are timed twice: cool (short bursts after idling, as kernel papers do) and under sustained
load, where the power limit sets the clock. fp32 rungs are timed against cuBLAS with TF32 off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from octavo.bench import correctness, provenance, timer
from octavo.bench.clocks import ClockSampler
from octavo.errors import KernelError
from octavo.kernels import ops
from octavo.kernels.launch import sm_count
from octavo.kernels.matmul import host
from octavo.kernels.matmul.registry import RUNGS, Rung

CUBLAS = "cublas"
_SLOW_RUNGS = 6  # below this number one launch takes long enough to be timed alone
_COOL_LAUNCHES = 8  # a burst short enough that the power limit has not caught it
_SAMPLE_US = 50_000.0


def run_ladder(
    sizes: Sequence[int] = (4096, 8192),
    rungs: Iterable[Rung] = RUNGS,
    *,
    modes: Sequence[str] = ("cool", "sustained"),
    rounds: int = 7,
    pause: float = 0.5,
    fp32_sizes: Sequence[int] = (4096,),
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Checks and times rungs on square problems of edge `sizes`. Raises KernelError without a GPU.

    Returns {"environment", "checks", "ilp", "results"}; each result has rung (a name or "cublas"),
    dtype, m, n, k, mode, median_us, low_us, high_us, tflops, vs_cublas, ok (checked right).
    """
    if not torch.cuda.is_available():
        raise KernelError("the ladder is timed on a CUDA GPU; there is none here")
    chosen = list(rungs)
    document: dict[str, Any] = {"environment": provenance.describe(), "results": []}
    document["ilp"] = [time_ilp(rung) for rung in chosen if rung.kind == "ilp"]
    fp32 = [r for r in chosen if r.kind == "matmul" and r.dtype == "fp32"]
    bf16 = [r for r in chosen if r.dtype == "bf16"]
    for mode in modes if bf16 else ():
        for size in sizes:
            wait = pause if mode == "cool" else 0.0
            document["results"] += time_square(bf16, size, mode, rounds, wait, progress)
    for size in fp32_sizes if fp32 else ():
        document["results"] += time_square(fp32, size, "sustained", rounds, 0.0, progress)
    return document


def write(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def time_square(
    rungs: Sequence[Rung],
    size: int,
    mode: str,
    rounds: int,
    pause: float,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """All `rungs` (one dtype) and cuBLAS at M = N = K = `size`, interleaved; see `run_ladder`."""
    dtype = rungs[0].dtype
    sets = _operand_sets(dtype, size)
    verdicts = {rung.name: _check_on(rung, sets[0], size) for rung in rungs}
    arms = {rung.name: _calls(rung, sets) for rung in rungs}
    arms[CUBLAS] = _cublas_calls(dtype, sets)
    flops = 2.0 * size**3
    results: list[dict[str, Any]] = []
    slow = {r.name for r in rungs if r.number < _SLOW_RUNGS}
    # A cool sample is short; a slow rung takes longer than the others' whole sample.
    timings: dict[str, timer.Timing] = {}
    with ClockSampler() as clocks:
        for group, launches in _groups(arms, slow, flops, mode):
            if mode == "sustained" and not group.keys() & slow:
                timer.hold_load(arms[CUBLAS][0], 1.0)
            timings |= timer.compare(
                group,
                launches=launches,
                rounds=3 if group.keys() & slow else rounds,
                pause=pause,
                settle=mode == "sustained" and not group.keys() & slow,
            )
    reference = timings[CUBLAS].median_us
    for name in sorted(timings):  # ladder order, then cuBLAS
        timing = timings[name]
        row = {
            "rung": name,
            "dtype": dtype,
            "m": size,
            "n": size,
            "k": size,
            "mode": mode,
            **asdict(timing),
            "tflops": flops / timing.median_us / 1e6,
            "vs_cublas": reference / timing.median_us,
            "ok": name == CUBLAS or verdicts[name].ok,
            "relative_norm": None if name == CUBLAS else verdicts[name].relative_norm,
        }
        results.append(row)
        progress(
            f"{name:24s} {dtype} {size} {mode:9s} {timing.median_us:10.1f} us "
            f"{row['tflops']:7.1f} TFLOP/s {row['vs_cublas']:6.3f} x cuBLAS "
            f"spread {timing.spread:.3f} {'ok' if row['ok'] else 'WRONG'}"
        )
    progress(f"clocks {dtype} {size} {mode}: {clocks.summary()}")
    results[-1]["clocks"] = clocks.summary()
    return results


def _groups(
    arms: dict[str, list[Callable[[], None]]], slow: set[str], flops: float, mode: str
) -> list[tuple[dict[str, list[Callable[[], None]]], int]]:
    """Arms that are timed together, with launches a sample: slow rungs alone, one launch each."""
    fast = {name: calls for name, calls in arms.items() if name not in slow}
    rate = 40e6 if slow else 700e6  # FLOP/us that the fast arms are near
    launches = max(4, min(200, round(_SAMPLE_US * rate / flops)))
    if mode == "cool":
        launches = _COOL_LAUNCHES
    groups = [(fast, launches)]
    if slow:
        groups.append(({name: arms[name] for name in arms if name in slow}, 1))
    return groups


def _operand_sets(dtype: str, size: int) -> list[correctness.Problem]:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    set_bytes = 3 * size * size * kind.itemsize

    def matrix() -> torch.Tensor:
        return torch.randn(size, size, device="cuda", dtype=kind)

    sets: list[correctness.Problem] = []
    for _ in range(timer.rotation_count(set_bytes)):
        out = matrix()
        sets.append(correctness.Problem(matrix(), matrix(), out, out.view(-1)))
    return sets


def _check_on(rung: Rung, problem: correctness.Problem, size: int) -> correctness.Check:
    problem.poison()
    ops.matmul(rung, problem.a, problem.b, problem.out)
    torch.cuda.synchronize()
    return correctness.compare(rung, problem, size, size, size)


def _calls(rung: Rung, sets: Sequence[correctness.Problem]) -> list[Callable[[], None]]:
    def call(problem: correctness.Problem) -> Callable[[], None]:
        return lambda: ops.matmul(rung, problem.a, problem.b, problem.out)

    return [call(problem) for problem in sets]


def _run_cublas(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def _cublas_calls(dtype: str, sets: Sequence[correctness.Problem]) -> list[Callable[[], None]]:
    torch.backends.cuda.matmul.allow_tf32 = False

    def call(problem: correctness.Problem) -> Callable[[], None]:
        right = problem.b.t() if dtype == "bf16" else problem.b
        return lambda: _run_cublas(problem.a, right, problem.out)

    return [call(problem) for problem in sets]


def time_ilp(rung: Rung, iterations: int = 4096) -> dict[str, Any]:
    """Rung 00: TFLOP/s of the dependent and of the independent chains, one warp a scheduler."""
    ctas = sm_count(0)
    out = torch.empty(ctas * rung.threads, device="cuda")
    flops = 2.0 * out.numel() * iterations * rung.constants["FMAS"]
    arms: dict[str, list[Callable[[], None]]] = {}
    for entry in ("ilp_dependent", "ilp_independent"):
        prepared = host.ilp_call(rung, entry, out, iterations, ctas)
        arms[entry] = [lambda p=prepared: p.kernel.launch(0, p.shape, p.parameters)]  # type: ignore[misc]
    timings = timer.compare(arms, launches=4, rounds=5)
    rates = {name: flops / timing.median_us / 1e6 for name, timing in timings.items()}
    return {
        "rung": rung.name,
        "tflops": rates,
        "ratio": rates["ilp_independent"] / rates["ilp_dependent"],
        "timings": {name: asdict(timing) for name, timing in timings.items()},
    }
