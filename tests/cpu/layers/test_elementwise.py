"""Norm, activation and embedding against plain formulas, and row invariance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from octavo.config.rope import RopeConfig
from octavo.kernels.triton.experts import reference_route
from octavo.layers.activation import silu_and_mul
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from tests.cpu.paged import assert_close, assert_same_bits

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def norm(size: int, dtype: torch.dtype) -> RMSNorm:
    layer = RMSNorm(size, 1e-5, dtype, CPU)
    layer.weight.data.copy_(torch.linspace(0.5, 1.5, size))
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_first(dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, 60).to(dtype), torch.randn(7, 60).to(dtype)
    layer = norm(60, dtype)
    normed, added = layer(x, residual)
    assert_same_bits(added, x + residual)
    wide = added.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight.double()
    assert_close(normed, expected, 2e-6 if dtype == torch.float32 else 3e-2)
    alone, same = layer(added)
    assert_same_bits(alone, normed)
    assert same is added


@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype, gelu: bool) -> None:
    x = torch.randn(5, 122).mul(4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    assert_close(silu_and_mul(x, gelu), expected, 1e-4 if dtype == torch.float32 else 0.5)
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], dtype=dtype)
    assert silu_and_mul(extreme, gelu).tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [60, 96, 1536])
def test_rows_do_not_depend_on_their_place(size: int, dtype: torch.dtype, threads: int) -> None:
    """torch's vector loops end in scalar ones; where they end must not show in the bits.

    F.silu fails this (its scalar loop has another exp), which is why it is not used.
    """
    x = torch.randn(301, 2 * size).to(dtype)
    layer = norm(2 * size, dtype)
    with_unit = RMSNorm(2 * size, 1e-5, dtype, CPU, unit_offset=True)
    with_unit.weight.data.normal_()
    rotary = RotaryEmbedding(RopeConfig(1e4), 2 * size, 400, CPU)

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        tables = rotary.tables(torch.full((len(rows),), 77))
        return rotary(rows[:, None], tables)[:, 0]

    operations: list[Callable[[torch.Tensor], torch.Tensor]] = [
        silu_and_mul,
        lambda rows: silu_and_mul(rows, gelu=True),
        lambda rows: layer(rows, rows)[0],
        lambda rows: with_unit(rows)[0],
        lambda rows: reference_route(rows, 2 * size, 8, True).weights,
        lambda rows: reference_route(rows, size + 1, 4, False).weights,
        rotate,
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for operation in operations:
            expected = operation(x)
            for rows in (slice(0, 1), slice(3, 10), slice(300, 301), slice(130, 301)):
                assert_same_bits(operation(x[rows]), expected[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tied", [True, False])
def test_lm_head_tied_or_not(tied: bool) -> None:
    embedding = Embedding(131, 64, torch.float32, CPU)
    embedding.weight.data.normal_()
    head = LMHead(131, 64, torch.float32, CPU, embedding if tied else None)
    assert [name for name, _ in head.named_parameters()] == ([] if tied else ["weight"])
    if head.weight is not None:
        head.weight.data.copy_(-embedding.weight)
    head.finalize("tiled")
    hidden = embedding(torch.tensor([5, 130]))
    expected = hidden @ embedding.weight.T * (1 if tied else -1)
    assert_close(head(hidden), expected, 1e-4)
    assert embedding.weight.shape == (131, 64)
