"""Experts' kernels in Triton's interpreter against the CPU path: every routing, ragged or not."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.cpu.kernels.triton.compile_harness import (
    SHARED_LIMIT,
    Case,
    CompiledKernel,
    compile_cases,
)
from tests.cpu.paged import assert_same_bits

from octavo.config.moe import MoEConfig
from octavo.errors import KernelError
from octavo.kernels.triton import experts, grouped_linear
from octavo.kernels.triton.experts import (
    Routing,
    combine,
    order_pairs,
    reference_combine,
    reference_route,
    route,
)
from octavo.kernels.triton.launch import row_options
from octavo.kernels.triton.linear import LARGE, MEDIUM, SMALL, TILES, Tile
from octavo.layers.moe import GroupedExperts, TiledExperts

BF16 = torch.bfloat16


def ragged(rows: int, top_k: int, num_experts: int, kind: str) -> torch.Tensor:
    """(rows, top_k) experts; of some kinds a token goes to one of them twice, which is allowed."""
    if kind == "one expert has all":
        return torch.full((rows, top_k), num_experts - 1, dtype=torch.int32)
    picked = torch.rand(rows, num_experts).argsort(-1)[:, :top_k].int()
    if kind == "some have none":
        picked = picked // 2 * 2
    if kind == "padding rows":
        picked[1::3] = num_experts
    return picked


KINDS = ["mixed", "one expert has all", "some have none", "padding rows"]


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN")
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (6, 2), (8, 8), (60, 4), (128, 8)])
def test_route(num_experts: int, top_k: int, renormalise: bool) -> None:
    """Equal scores too, which bf16 makes often: the first of them is better."""
    scores = torch.randn(9, num_experts + 3).mul(2).to(BF16)
    scores[3] = 1.0
    slots = torch.arange(9)
    slots[[2, 8]] = -1
    got = route(scores, slots, num_experts, top_k, renormalise)
    expected = reference_route(scores, num_experts, top_k, renormalise)
    live = slots >= 0
    assert torch.equal(got.experts[live].long(), expected.experts[live])
    assert torch.equal(got.experts[~live], torch.full((2, top_k), num_experts, dtype=torch.int32))
    torch.testing.assert_close(got.weights[live], expected.weights[live], rtol=1e-6, atol=1e-7)
    alone = route(scores[4:5], slots[4:5], num_experts, top_k, renormalise)
    assert_same_bits(alone.weights, got.weights[4:5])
    scores[8] = torch.nan
    assert not route(scores, slots, num_experts, top_k, renormalise).weights[8].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_of_nan_goes_to_an_expert_that_exists() -> None:
    scores = torch.full((2, 6), torch.nan)
    scores[1] = torch.arange(6)
    got = route(scores, torch.arange(2), 6, 2, True)
    assert bool(((got.experts >= 0) & (got.experts < 6)).all())
    assert bool(got.weights[0].isnan().all())
    assert got.experts[1].tolist() == [5, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "top_k", "num_experts"), [(1, 2, 4), (37, 4, 12), (700, 3, 5)])
def test_order_pairs(rows: int, top_k: int, num_experts: int, kind: str) -> None:
    picked = ragged(rows, top_k, num_experts, kind)
    order = order_pairs(picked, num_experts)
    for expert, (begin, end) in enumerate(order.bounds.T.tolist()):
        assert begin == (picked < expert).sum()
        assert (
            order.pairs[begin:end].tolist()
            == (picked.view(-1) == expert).nonzero().view(-1).tolist()
        )


def by_expert(x: torch.Tensor, weight: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Each pair's product, (P, N); NaN for a pair without an expert."""
    rows, experts = x.repeat_interleave(picked.numel() // len(x), 0), picked.view(-1)
    out = x.new_full((len(rows), weight.shape[1]), torch.nan)
    for expert, one in enumerate(weight):
        wide = rows[experts == expert].double() @ one.double().t()
        out[experts == expert] = wide.to(x.dtype)
    return out


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last bit of sums that numpy takes in another order."""
    close = {"rtol": 2 * torch.finfo(got.dtype).eps, "atol": 1e-3}
    torch.testing.assert_close(got.float(), expected.float(), **close)
    assert (got != expected).double().mean() <= 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_grouped_linear(kind: str, dtype: torch.dtype) -> None:
    """In two tiles, with K and N that fill none; bits are compared on the GPU."""
    picked = ragged(11, 2, 4, kind)
    order = order_pairs(picked, 4)
    has_expert = (picked < 4).view(-1)
    x, weight = torch.randn(11, 136).to(dtype), torch.randn(4, 24, 136).to(dtype)
    expected = by_expert(x, weight, picked)
    for tile in (None, Tile(32, 32, 32, num_warps=1, num_stages=1)):
        got = grouped_linear.grouped_linear(x, weight, order, tile)
        assert_near(got[has_expert], expected[has_expert])
    # A row of its own for each pair, as in the second product.
    own, down = torch.randn(22, 24).to(dtype), torch.randn(4, 40, 24).to(dtype)
    got = grouped_linear.grouped_linear(own, down, order)
    assert_near(got[has_expert], by_expert(own, down, picked)[has_expert])


def test_tiles_follow_the_mean_number_of_rows() -> None:
    choose = grouped_linear.choose_tile
    assert [choose(pairs, 128) for pairs in (8, 2048, 2049, 8192, 8193)] == [
        SMALL, SMALL, MEDIUM, MEDIUM, LARGE,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["mixed", "padding rows"])
@pytest.mark.parametrize("with_shared", [False, True])
def test_combine(with_shared: bool, kind: str) -> None:
    picked = ragged(7, 3, 5, kind)
    weights = torch.rand(7, 3)
    answers, scores = torch.randn(21, 1100).to(BF16), torch.randn(7, 8).to(BF16)
    shared = torch.randn(7, 1100).to(BF16) if with_shared else None
    got = combine(answers, Routing(picked, weights), 5, scores, shared)
    weights[picked == 5] = 0
    expected = reference_combine(answers, Routing(picked, weights), 5, scores, shared)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-6)
    assert (got != expected).double().mean() <= 0.02
    answers[(picked == 5).view(-1)] = torch.nan  # what was never written is not read
    assert_same_bits(combine(answers, Routing(picked, weights), 5, scores, shared), got)


@pytest.mark.parametrize(("renormalise", "shared"), [(True, False), (False, True)])
def test_the_gpu_path_against_the_cpu_path(renormalise: bool, shared: bool) -> None:
    """The whole block in bf16, whole and with padding rows."""
    config = MoEConfig(4, 2, 24, renormalise, 32 if shared else 0)
    gate_up, down = torch.randn(4, 48, 40).to(BF16), torch.randn(4, 40, 24).to(BF16)
    x, scores = torch.randn(7, 40).to(BF16), torch.randn(7, 8).to(BF16)
    always = torch.randn(7, 40).to(BF16) if shared else None
    slots = torch.arange(7)
    grouped = GroupedExperts(config, gate_up, down)
    expected = TiledExperts(config, gate_up, down)(x, scores, slots, always).float()
    for live in (slots >= 0, slots % 2 == 1):
        got = grouped(x, scores, torch.where(live, slots, -1), always).float()
        # Both round products, gate and answers to bf16; a flipped rounding shows in a sum.
        torch.testing.assert_close(got[live], expected[live], rtol=0.02, atol=0.5)
        assert (got[live] - expected[live]).abs().mean() < 0.02


def test_what_does_not_fit_is_named() -> None:
    order = order_pairs(torch.zeros(2, 1, dtype=torch.int32), 3)
    run = grouped_linear.grouped_linear
    x, weight = torch.zeros(2, 16, dtype=BF16), torch.zeros(3, 8, 16, dtype=BF16)
    with pytest.raises(KernelError, match="float32"):
        run(x.float(), weight.float(), order)
    with pytest.raises(KernelError, match="contiguous"):
        run(x, weight.transpose(1, 2), order)
    with pytest.raises(KernelError, match="cannot multiply"):
        run(x[:, :8].contiguous(), weight, order)
    with pytest.raises(KernelError, match="cannot multiply"):
        run(x, weight[:, :7].contiguous(), order)


T = "*bf16"
GROUPED = {
    "x": T, "weight": T, "pairs": "*i32", "begins": "*i32", "ends": "*i32", "y": T,
    "tiles_m": "i32", "n_by_8": "i32", "k_by_8": "i32",
}  # fmt: skip
COMBINE = {
    "answers": T, "experts": "*i32", "weights": "*fp32", "shared": T, "scores": T, "out": T,
    "row_stride": "i32",
}  # fmt: skip


def grouped_case(tile: Tile, even_k: bool) -> Case:
    options = grouped_linear.launch_options(tile, even_k, 128, 8 if even_k else 1)
    label = f"grouped {tile.block_m} {even_k}"
    return Case.of_launch(grouped_linear._grouped_linear, GROUPED, options, label)


CASES = [
    *(grouped_case(tile, even_k=tile != SMALL) for tile in TILES),
    Case.of_launch(
        experts._route,
        {"scores": T, "slot_mapping": "*i64", "experts": "*i32", "weights": "*fp32", "row_stride": "i32"},
        {"EXPERTS": 128, "TOP_K": 8, "RENORMALISE": True, "BLOCK": 128, "num_warps": 1},
        "route",
    ),
    Case.of_launch(
        experts._order_pairs,
        {"experts": "*i32", "pairs": "*i32", "begins": "*i32", "ends": "*i32", "num_pairs": "i32"},
        {"BLOCK": 2048, "num_warps": 8},
        "order",
    ),
    Case.of_launch(
        experts._combine,
        COMBINE,
        {"EXPERTS": 128, "TOP_K": 8, "SHARED": True, "SIZE": 2048, **row_options(2048)},
        "combine",
    ),
]  # fmt: skip


@functools.cache
def compiled() -> dict[str, CompiledKernel]:
    return compile_cases(CASES)


@pytest.mark.parametrize("label", [case.name for case in CASES])
def test_compiles_for_hopper(label: str) -> None:
    kernel = compiled()[label]
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.registers * kernel.num_warps * 32 <= 65_536
    if label.startswith("grouped"):
        assert ("mma.sync" if " 16 " in label else "wgmma") in kernel.features
        assert "cp.async" in kernel.features
