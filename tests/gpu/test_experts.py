"""Mixtures of experts on the GPU: the bits of the dense product, rows alone, graphs, whole engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.engines import engine, model_folder
from tests.gpu.test_engine import LENGTHS, one_by_one, together
from tests.gpu.test_fused_ops import (
    BF16,
    ROWS,
    assert_rounds_alike,
    assert_rows_stand_alone,
    fresh_memory_is_nan,
    random,
    same_bits,
)

from octavo.config.moe import MoEConfig
from octavo.kernels.triton.experts import (
    Routing,
    combine,
    order_pairs,
    reference_combine,
    reference_route,
    route,
)
from octavo.kernels.triton.grouped_linear import choose_tile, grouped_linear
from octavo.kernels.triton.linear import TILES, fixed_linear
from octavo.layers.moe import GroupedExperts

KINDS = ["mixed", "one expert has all", "some have none", "padding rows"]


def picked_experts(rows: int, top_k: int, num_experts: int, kind: str) -> torch.Tensor:
    """(rows, top_k) int32; of some kinds a token goes to one expert twice, which is allowed."""
    if kind == "one expert has all":
        return torch.full((rows, top_k), num_experts - 1, dtype=torch.int32, device="cuda")
    picked = random(rows, num_experts, dtype=torch.float32).argsort(-1)[:, :top_k].int()
    if kind == "some have none":
        picked = picked // 4 * 4
    if kind == "padding rows":
        picked[1::3] = num_experts
    return picked.contiguous()


def by_expert(x: torch.Tensor, weight: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Each pair's product by the dense kernel, (P, N); NaN for a pair without an expert."""
    rows, experts = x.repeat_interleave(picked.numel() // len(x), 0), picked.view(-1)
    out = x.new_full((len(rows), weight.shape[1]), torch.nan)
    for expert in experts.unique().tolist():
        if expert < len(weight):
            mine = experts == expert
            out[mine] = fixed_linear(rows[mine].contiguous(), weight[expert])
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_experts", "top_k", "n", "k", "dtype"),
    [
        (128, 8, 1536, 2048, BF16),
        (8, 2, 4096, 1032, BF16),
        (60, 4, 136, 264, BF16),
        (60, 4, 136, 264, torch.float16),
    ],
)
def test_grouped_linear_has_the_bits_of_the_dense_one(
    num_experts: int, top_k: int, n: int, k: int, kind: str, dtype: torch.dtype
) -> None:
    """In every tile, for a row read by each of its pairs and for a row of its own."""
    weight = random(num_experts, n, k, dtype=dtype)
    for rows in (1, 7, 64, 300):
        picked = picked_experts(rows, top_k, num_experts, kind)
        order = order_pairs(picked, num_experts)
        real = (picked < num_experts).view(-1)
        for count in (rows, rows * top_k):
            x = random(count, k, dtype=dtype, seed=rows)
            expected = by_expert(x, weight, picked)[real]
            for tile in (None, *TILES):
                with fresh_memory_is_nan():
                    got = grouped_linear(x, weight, order, tile)[real]
                assert bool(torch.isfinite(got).all())
                assert same_bits(got, expected), (rows, count, tile)


def test_grouped_linear_beyond_31_bits() -> None:
    weight = random(64, 4096, 8200)
    assert weight.numel() > 2**31
    picked = torch.tensor([[63, 0], [31, 63]], dtype=torch.int32, device="cuda")
    x = random(2, 8200, seed=1)
    got = grouped_linear(x, weight, order_pairs(picked, 64))
    assert same_bits(got, by_expert(x, weight, picked))
    del weight
    weight, x = random(4, 16_384, 16), random(70_000, 16, seed=2)
    picked = picked_experts(70_000, 2, 4, "mixed")
    got = grouped_linear(x, weight, order_pairs(picked, 4))
    assert got.numel() > 2**31
    assert same_bits(got[-50:], by_expert(x[-25:].contiguous(), weight, picked[-25:]))


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4), (128, 8), (300, 16)])
def test_route_and_order(num_experts: int, top_k: int, renormalise: bool) -> None:
    scores = random(ROWS, num_experts + 3) * 2
    slots = torch.arange(ROWS, device="cuda")
    slots[::7] = -1
    live = slots >= 0
    got = route(scores, slots, num_experts, top_k, renormalise)
    expected = reference_route(scores, num_experts, top_k, renormalise)
    assert torch.equal(got.experts[live].long(), expected.experts[live])
    assert bool((got.experts[~live] == num_experts).all())
    torch.testing.assert_close(got.weights[live], expected.weights[live], rtol=1e-5, atol=1e-7)
    order = order_pairs(got.experts, num_experts)
    begins, ends = order.bounds.tolist()
    flat = got.experts.view(-1)
    for expert in range(num_experts):
        found = order.pairs[begins[expert] : ends[expert]].long()
        assert torch.equal(found, (flat == expert).nonzero().view(-1)), expert


@pytest.mark.parametrize("with_shared", [False, True])
def test_combine(with_shared: bool) -> None:
    picked = picked_experts(ROWS, 8, 128, "padding rows")
    weights = random(ROWS, 8, dtype=torch.float32).softmax(-1)
    answers, scores = random(ROWS * 8, 2048), random(ROWS, 136, seed=1)
    shared = random(ROWS, 2048, seed=2) if with_shared else None
    got = combine(answers, Routing(picked, weights), 128, scores, shared)
    weights = weights.masked_fill(picked == 128, 0)
    expected = reference_combine(answers, Routing(picked, weights), 128, scores, shared)
    assert_rounds_alike(got, expected)


def block(num_experts: int = 32, top_k: int = 4) -> tuple[GroupedExperts, torch.Tensor]:
    """Experts of Qwen3-30B-A3B's widths, and a router."""
    config = MoEConfig(num_experts, top_k, 768, renormalise=True)
    gate_up, down = random(num_experts, 1536, 2048), random(num_experts, 2048, 768, seed=1)
    experts = GroupedExperts(config, gate_up * 0.03, down * 0.03)
    return experts, random(num_experts, 2048, seed=2) * 0.03


def test_rows_stand_alone() -> None:
    """Any number of rows, in any order, beside NaN; the tile changes with their number."""
    experts, router = block()
    assert len({choose_tile(rows * 4, 32) for rows in range(1, ROWS + 1)}) > 1
    slots = torch.arange(ROWS, device="cuda")

    def run(rows: torch.Tensor) -> torch.Tensor:
        return experts(rows, fixed_linear(rows, router), slots[: len(rows)], None)

    assert_rows_stand_alone(run, random(ROWS, 2048, seed=3))


def test_padding_rows_cost_nothing_and_change_nothing() -> None:
    experts, router = block()
    x, slots = random(40, 2048, seed=3), torch.arange(40, device="cuda")
    expected = experts(x, fixed_linear(x, router), slots, None)
    x[5:] = torch.nan
    slots[5:] = -1
    with fresh_memory_is_nan():
        got = experts(x, fixed_linear(x, router), slots, None)
    assert same_bits(got[:5], expected[:5])
    assert not got[5:].any()
    routing = route(fixed_linear(x, router), slots, 32, 4, True)
    assert int(order_pairs(routing.experts, 32).bounds[1, -1]) == 5 * 4


def test_a_graph_serves_any_routing() -> None:
    """Capture allows no synchronisation; the plan is made anew at each replay."""
    experts, router = block()
    x, slots = random(48, 2048), torch.arange(48, device="cuda")

    def run() -> torch.Tensor:
        return experts(x, fixed_linear(x, router), slots, None)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(4):
        x.copy_(random(48, 2048, seed=seed))
        if seed == 2:
            x[:] = x[:1].clone()  # all to the same experts
        graph.replay()
        replayed = captured.clone()
        assert same_bits(replayed, run())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@pytest.fixture(scope="module")
def solo(model: Path) -> list[Any]:
    prints = one_by_one(model)
    assert len({tokens for tokens, _ in prints}) == len(LENGTHS)
    return prints


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True, "async_scheduling": False},
        {"long_prefill_token_threshold": 37, "max_num_seqs": 16},
        {"long_prefill_token_threshold": 501, "enforce_eager": True},
    ],
    ids=["graphs", "eager", "chunks-37", "chunks-501"],
)
def test_batched_chunked_and_warm_equal_solo(
    settings: dict[str, Any], model: Path, solo: list[Any]
) -> None:
    with engine(model, **settings) as llm:
        for order in (None, list(reversed(range(len(LENGTHS))))):
            assert together(llm, order) == solo


def test_preempted_equals_solo(model: Path, solo: list[Any]) -> None:
    scarce = {"num_gpu_blocks_override": sum(-(-length // 16) for length in LENGTHS) + 4}
    with engine(model, max_model_len=None, enable_prefix_caching=False, **scarce) as llm:
        assert together(llm) == solo
        assert llm.engine.core.stats().num_preemptions > 0


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_nothing_is_compiled_while_serving(mode: str, model: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.watch_compilations", str(model), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert not compiled, "compiled while serving:\n" + "\n".join(compiled)


def test_cublas_dense_layers_beside_experts(model: Path) -> None:
    """The other backend serves such a model, too; its bits may depend on the batch."""
    with engine(model, linear_backend="cublas") as llm:
        prints = together(llm)
    assert all(len(tokens) == 24 for tokens, _ in prints)


def test_fp16(tmp_path: Path) -> None:
    model = model_folder(tmp_path, "qwen2_moe")
    solo = one_by_one(model, dtype="float16")
    with engine(model, dtype="float16") as llm:
        assert together(llm) == solo


def test_bf16_is_what_the_routing_is_checked_in() -> None:
    """Equal scores, frequent in bf16, go to the first experts on the GPU as on the CPU."""
    scores = random(ROWS, 128).mul(2).round().to(BF16)
    slots = torch.arange(ROWS, device="cuda")
    got = route(scores, slots, 128, 8, True)
    assert torch.equal(got.experts.long(), reference_route(scores, 128, 8, True).experts)
