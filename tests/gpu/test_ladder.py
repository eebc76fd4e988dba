"""Every rung on the GPU: right on ragged shapes, repeatable, capturable, and strict about operands."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_int, c_size_t

import pytest
import torch
from tests.gpu.problems import make_problem
from tests.gpu.ragged import ragged_shapes

from octavo.bench import correctness
from octavo.errors import KernelError
from octavo.kernels import cache, driver, ops
from octavo.kernels.launch import Kernel
from octavo.kernels.matmul import host
from octavo.kernels.matmul.occupancy import occupancy
from octavo.kernels.matmul.registry import RUNGS, Rung, rung

MATMULS = [r for r in RUNGS if r.kind == "matmul"]
BF16 = [r for r in MATMULS if r.dtype == "bf16"]


def named(each: Rung) -> str:
    return each.name


def operands(
    each: Rung, m: int, n: int, k: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    problem = make_problem(each, m, n, k, seed)
    return problem.a, problem.b, problem.out


@pytest.mark.parametrize("each", MATMULS, ids=named)
def test_ragged_shapes(each: Rung) -> None:
    for seed, shape in enumerate(ragged_shapes(each)):
        problem = make_problem(each, *shape, seed=seed)
        check = correctness.run_and_compare(each, problem)
        assert check.ok, check


@pytest.mark.parametrize("each", [r for r in BF16 if r.persistent], ids=named)
def test_ragged_shapes_on_one_cluster(each: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tiles by one cluster: what a tile leaves behind in ring and staging meets the next one."""
    monkeypatch.setattr(Kernel, "resident_ctas", lambda _self, _device, shape: shape.cluster)
    shapes = [one for one in ragged_shapes(each) if max(one) > 130]
    for seed, shape in enumerate(shapes, 1000):
        problem = make_problem(each, *shape, seed=seed)
        problem.poison()
        call = host.prepare(each, problem.a, problem.b, problem.out)
        call.kernel.launch(0, call.shape, call.parameters)
        check = correctness.compare(each, problem)
        assert check.ok, check


def test_a_thread_without_a_context_launches() -> None:
    """Nothing of torch ran on that thread, so no context is current there."""
    a, b, out = operands(rung(20), 256, 512, 128)
    ops.matmul(20, a, b, out)
    expected = out.clone()
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    kernel = Kernel(
        rung(20).source, rung(20).entry, "20.cu", rung(20).dynamic_smem
    )  # not loaded yet

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "kernel_of", lambda _: kernel)
            call = host.prepare(rung(20), a, b, out)  # asks the driver what fits, too
        call.kernel.launch(0, call.shape, call.parameters)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("each", BF16, ids=named)
def test_a_thousand_repeats_are_bit_equal(each: Rung) -> None:
    a, b, out = operands(each, 2 * each.block_m + 72, 3 * each.block_n + 8, 456)
    ops.matmul(each, a, b, out)
    first = out.clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.fill_(float("nan"))
        ops.matmul(each, a, b, out)
        wrong += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(wrong) == 0
    assert bool(torch.isfinite(first).all())


@pytest.mark.parametrize("each", BF16, ids=named)
def test_large_and_busy_launches_are_bit_equal(each: Rung) -> None:
    """Many tiles a CTA, so staging and stages are reused; every output is compared on the device."""
    problem = make_problem(each, 3000, 4104, 1032, seed=0)
    a, b, out = problem.a, problem.b, problem.out
    check = correctness.run_and_compare(each, problem)
    assert check.ok, check
    first = out.clone()
    for _ in range(50):
        out.fill_(float("nan"))
        ops.matmul(each, a, b, out)
        assert torch.equal(out.view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize("number", [2, 8, 9, 13, 19, len(RUNGS) - 1])
def test_offsets_beyond_31_bits(number: int) -> None:
    """70,000 x 33,000 outputs: 2.3e9 elements. The last rows land where 32-bit offsets wrap."""
    each = rung(number)
    m, n, k = 70_000, 33_000, 8
    dtype = torch.float32 if each.dtype == "fp32" else torch.bfloat16
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn((n, k) if dtype is torch.bfloat16 else (k, n), device="cuda", dtype=dtype)
    out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    ops.matmul(each, a, b, out)
    right = b.double().t() if dtype is torch.bfloat16 else b.double()
    for rows in (slice(0, 64), slice(m // 2, m // 2 + 64), slice(m - 64, m)):
        exact = a[rows].double() @ right
        error = (out[rows].double() - exact).abs().max()
        assert float(error) <= 0.15, (number, rows)
    sample = out[::997, ::991]
    assert bool(torch.isfinite(sample).all())


@pytest.mark.parametrize("each", MATMULS, ids=named)
def test_graph_replay_reads_fresh_inputs(each: Rung) -> None:
    a, b, out = operands(each, 200, 136, 96)
    ops.matmul(each, a, b, out)  # load before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.matmul(each, a, b, out)
    for seed in range(3):
        a.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        out.fill_(float("nan"))
        graph.replay()
        reference = torch.empty_like(out)
        ops.matmul(each, a, b, reference)
        assert torch.equal(out, reference)


def test_first_use_inside_a_capture_is_refused_and_leaves_a_usable_stream() -> None:
    kernel = Kernel(rung(9).source + "// another text, so not loaded\n", rung(9).entry)
    a, b, out = operands(rung(9), 64, 64, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.zero_()
        with pytest.raises(KernelError, match="before capturing"):
            kernel.load(0)
    ops.matmul(9, a, b, out)
    torch.cuda.synchronize()


@pytest.mark.parametrize("number", [8, 12, len(RUNGS) - 1])
def test_torch_compile_keeps_the_op(number: int) -> None:
    each = rung(number)
    a, b, out = operands(each, 128, 256, 128)

    def step(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ops.matmul(number, a, b, out)
        return out * 2

    doubled = torch.compile(step, fullgraph=True)(a, b, out)
    expected = torch.empty_like(out)
    ops.matmul(number, a, b, expected)
    assert torch.equal(doubled, expected * 2)


def test_op_registration_passes_torchs_own_checks() -> None:
    a, b, out = operands(rung(12), 128, 256, 128)
    torch.library.opcheck(torch.ops.octavo.ladder_matmul.default, (12, a, b, out))


def test_side_stream_is_respected() -> None:
    a, b, out = operands(rung(20), 4096, 4096, 4096)
    expected = torch.empty_like(out)
    ops.matmul(20, a, b, expected)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            out.fill_(float("nan"))
            ops.matmul(20, a, b, out)
        result = out.clone()
    stream.synchronize()
    assert torch.equal(result, expected)


def test_new_operands_at_the_same_shape_are_not_mistaken_for_the_old() -> None:
    """fast.cu keyed its tensor maps on M alone; ours hold every address, shape and stride."""
    each = rung(20)
    kept = [operands(each, 256, 512, 128, seed) for seed in range(4)]
    for a, b, out in kept:
        ops.matmul(each, a, b, out)
    for a, b, out in kept:
        exact = a.double() @ b.double().t()
        assert float((out.double() - exact).abs().max()) <= 0.3
    narrower = kept[0][1][:264]
    out = torch.full((256, 264), float("nan"), device="cuda", dtype=torch.bfloat16)
    ops.matmul(each, kept[0][0], narrower, out)
    assert float((out.double() - kept[0][0].double() @ narrower.double().t()).abs().max()) <= 0.3


def test_odd_strides_and_offsets_are_host_errors() -> None:
    base = torch.randn(70, 136, device="cuda", dtype=torch.bfloat16)
    good = base[:64, :64]
    out = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    bad = {
        "address": base.view(-1)[1 : 1 + 64 * 64].view(64, 64),
        "row stride": torch.randn(64, 65, device="cuda", dtype=torch.bfloat16)[:, :64],
        "columns must be contiguous": torch.randn(64, 64, device="cuda", dtype=torch.bfloat16).t(),
        "overlapping rows": base.as_strided((64, 64), (8, 1)),
    }
    for message, tensor in bad.items():
        with pytest.raises(KernelError, match=message):
            ops.matmul(12, tensor, good, out)
        with pytest.raises(KernelError, match=message):
            ops.matmul(12, good, tensor, out)
    ops.matmul(12, good, good, out)
    square = torch.randn(64, 64, device="cuda")
    strided = torch.randn(64, 72, device="cuda")[:, :64]
    with pytest.raises(KernelError, match="contiguous"):
        ops.matmul(8, strided, square, torch.empty_like(square))


def test_empty_outputs_are_no_launch() -> None:
    for shape in ((0, 64), (64, 0)):
        a = torch.randn(shape[0], 64, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(shape[1], 64, device="cuda", dtype=torch.bfloat16)
        ops.matmul(20, a, b, torch.empty(shape, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()


@pytest.mark.parametrize("each", MATMULS, ids=named)
def test_occupancy_twin_agrees_with_the_driver(each: Rung) -> None:
    kernel = host.kernel_of(each)
    function = kernel.load(0)
    actual, threads, smem = c_int(), c_int(each.threads), c_size_t(each.dynamic_smem)
    ask = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    driver.call(ask, byref(actual), function, threads, smem)
    resources = cache.compile_cached(each.source, name=each.path.name).resources[each.entry]
    predicted = occupancy(
        threads=each.threads,
        registers_per_thread=resources.registers,
        smem_bytes=each.dynamic_smem + resources.static_smem,
    )
    assert predicted.ctas_per_sm == actual.value
