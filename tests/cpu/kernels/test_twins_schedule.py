"""Tile orders: each tile once, Hilbert's neighbours, and what an order costs in a simulated L2."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.matmul.schedule import (
    grouped_order,
    hilbert_order,
    naive_order,
    simulate_l2,
)

sides = st.integers(1, 48)


@given(sides, sides, st.integers(1, 20))
def test_every_order_visits_each_tile_once(m: int, n: int, group: int) -> None:
    every = sorted((i, j) for i in range(m) for j in range(n))
    for order in (naive_order(m, n), grouped_order(m, n, group), hilbert_order(m, n)):
        assert sorted(order) == every


@given(sides, sides)
def test_hilbert_steps_to_a_neighbour(m: int, n: int) -> None:
    order = hilbert_order(m, n)
    steps = [(abs(a - c), abs(b - d)) for (a, b), (c, d) in itertools.pairwise(order)]
    assert all(max(step) == 1 for step in steps)
    diagonal = sum(step == (1, 1) for step in steps)
    odd_long_even_short = max(m, n) % 2 == 1 and min(m, n) % 2 == 0
    assert diagonal <= (1 if odd_long_even_short else 0)


def test_hilbert_is_the_classic_curve_on_a_square() -> None:
    assert hilbert_order(2, 2) == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert hilbert_order(1, 3) == [(0, 0), (0, 1), (0, 2)]
    assert hilbert_order(3, 1) == [(0, 0), (1, 0), (2, 0)]


def test_hilbert_of_a_long_strip_is_quick() -> None:
    assert len(hilbert_order(1, 5000)) == 5000
    assert len(hilbert_order(2005, 3)) == 6015


def test_grouped_order_by_hand() -> None:
    # 3 x 2 tiles in bands of 2: the first band column by column, then the thin last band.
    assert grouped_order(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert grouped_order(3, 2, 1) == naive_order(3, 2)


@pytest.mark.parametrize("bad", [(0, 1), (1, 0), (-2, 3)])
def test_empty_grids_are_refused(bad: tuple[int, int]) -> None:
    for call in (naive_order, hilbert_order, lambda m, n: grouped_order(m, n, 2)):
        with pytest.raises(ValueError, match="no tile"):
            call(*bad)
    with pytest.raises(ValueError, match="group"):
        grouped_order(2, 2, 0)


def wave_panels(order: list[tuple[int, int]]) -> float:
    """Mean over full waves of 132 tiles of the distinct A and B panels in one wave."""
    waves = [order[i : i + 132] for i in range(0, len(order) // 132 * 132, 132)]
    counts = [len({m for m, _ in wave}) + len({n for _, n in wave}) for wave in waves]
    return sum(counts) / len(counts)


def test_compact_orders_need_fewer_panels_and_less_dram_than_naive() -> None:
    """8192^3, 128x256 tiles, 132 CTAs, 60 MB of L2: the case the schedule rung is about."""
    shape = {"block_m": 128, "block_n": 256, "k": 8192, "num_ctas": 132, "l2_bytes": 60_000_000}
    naive = simulate_l2(naive_order(64, 32), **shape)
    hilbert = simulate_l2(hilbert_order(64, 32), **shape)
    # 132 tiles in row order touch 4 or 5 of 64 A panels and all 32 B panels: about 37.
    assert wave_panels(naive_order(64, 32)) == pytest.approx(37, abs=1)
    for compact in (grouped_order(64, 32, 16), hilbert_order(64, 32)):
        assert wave_panels(compact) < 0.8 * wave_panels(naive_order(64, 32))
    assert hilbert.dram_bytes < 0.8 * naive.dram_bytes
    assert naive.requested_bytes == hilbert.requested_bytes == 2048 * (128 + 256) * 8192 * 2


@given(sides, sides, st.integers(1, 140))
def test_dram_bytes_lie_between_compulsory_and_requested(m: int, n: int, ctas: int) -> None:
    shape = {"block_m": 2, "block_n": 3, "k": 8, "num_ctas": ctas, "chunk_k": 4}
    small = simulate_l2(hilbert_order(m, n), l2_bytes=200, **shape)
    large = simulate_l2(hilbert_order(m, n), l2_bytes=10**9, **shape)
    assert small.compulsory_bytes == large.compulsory_bytes == large.dram_bytes
    assert large.dram_bytes <= small.dram_bytes <= small.requested_bytes
    assert 0.0 <= small.hit_rate <= large.hit_rate < 1.0
