"""CPU linears: a row's bits depend on nothing but the row; right against double precision."""

from __future__ import annotations

import pytest
import torch

from octavo.layers import linear
from octavo.layers.linear import Linear, TiledLinear, choose_tiles, cover
from tests.cpu.paged import assert_close, assert_same_bits

CPU = torch.device("cpu")
# qkv, o, gate_up, down and lm_head of SmolLM2, and widths that fill no register.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (131, 60)]
ROWS = (1, 2, 3, 15, 16, 17, 31, 33, 48, 100, 129)


def random(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    out_features, in_features = shape
    rows = 64 if out_features > 10_000 else 530
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    return torch.randn(rows, in_features, generator=generator).to(dtype), weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_their_number_or_place(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Any number of rows from any offset, also from a buffer at an odd address: the same bits."""
    x, weight = random(shape, dtype)
    product = TiledLinear(weight, None)
    expected = product(x)
    assert_close(expected, x.double() @ weight.double().T, 5e-4 if dtype.itemsize == 4 else 2.0)
    total = len(x)
    for rows in (*ROWS, 501, 512):
        for offset in {0, 5, total - rows}:
            if 0 <= offset <= total - rows:
                part = slice(offset, offset + rows)
                assert_same_bits(product(x[part]), expected[part])
    shifted = torch.cat((torch.zeros(1), x[:20].float().flatten())).to(dtype)[1:].view(20, -1)
    assert_same_bits(product(shifted), expected[:20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_is_added_once(dtype: torch.dtype) -> None:
    x, weight = random((131, 300), dtype)
    bias = torch.randn(131).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    assert_close(TiledLinear(weight, bias)(x), exact, 5e-4 if dtype.itemsize == 4 else 1.0)


def test_without_private_operators_the_plain_call_is_tiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fallback has the same promise: its larger tiles pass the same probe."""
    monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)
    choose_tiles.cache_clear()
    x, weight = random((576, 576), torch.float32)
    product = TiledLinear(weight, None)
    choose_tiles.cache_clear()
    expected = product(x)
    assert_close(expected, x.double() @ weight.double().T, 5e-4)
    for rows in ROWS:
        assert_same_bits(product(x[:rows]), expected[:rows])


def test_tiles_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe sees a product whose bits change above 64 rows."""
    weight = torch.randn(32, 32)

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ weight * (1 + 1e-6 * (len(x) > 64))

    monkeypatch.setattr(linear, "packed_product", lambda *_: product)
    choose_tiles.cache_clear()
    _, tiles = choose_tiles(32, 32, torch.float32, 1)
    choose_tiles.cache_clear()
    assert 16 in tiles
    assert not {128, 256, 512} & set(tiles)


def test_tiles_cover_all_rows() -> None:
    assert cover(16, (16,)) == [16]
    assert cover(1104, (16, 32, 512)) == [512, 512, 32, 32, 16]
    for rows in range(16, 1600, 16):
        assert sum(cover(rows, (16, 64, 256))) == rows


def test_the_plain_weight_is_released() -> None:
    """One copy of a weight in memory, the packed one."""
    layer = Linear(64, (32, 16), torch.float32, CPU)
    assert layer.weight is not None
    layer.weight.data.uniform_()
    layer.finalize("tiled")
    assert list(layer.parameters()) == []
    assert layer(torch.ones(3, 64)).shape == (3, 48)
