"""Stream-K work shares: every K block once, equal loads, and no cluster that waits for itself."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.matmul.stream import COST_BLOCKS, stream_pieces, streamed_tiles


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 70), st.integers(1, 400), st.integers(1, 130))
def test_each_k_block_is_computed_once(clusters: int, tiles: int, blocks: int) -> None:
    streamed = streamed_tiles(tiles, blocks, clusters)
    seen: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for cluster in range(clusters):
        for tile, begin, end in stream_pieces(tiles, blocks, clusters, streamed, cluster):
            assert begin < end
            seen[tile].append((begin, end, cluster))
    assert sorted(seen) == list(range(tiles))
    for parts in seen.values():
        parts.sort()
        assert parts[0][0] == 0
        assert parts[-1][1] == blocks
        assert len(parts) <= 2, "a tile has one head and at most one tail"
        if len(parts) == 2:
            assert parts[0][1] == parts[1][0]
            assert parts[1][2] == parts[0][2] + 1, "the tail is with the next cluster"


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 70), st.integers(1, 400), st.integers(1, 130))
def test_tails_come_first_and_loads_are_equal(clusters: int, tiles: int, blocks: int) -> None:
    streamed = streamed_tiles(tiles, blocks, clusters)
    loads = []
    for cluster in range(clusters):
        pieces = stream_pieces(tiles, blocks, clusters, streamed, cluster)
        loads.append(sum(end - begin for _, begin, end in pieces))
        for index, (_, begin, _) in enumerate(pieces):
            assert begin == 0 or index == 0, "a tail waits for nothing, so no cycle of waits exists"
    if streamed:
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("tiles", "blocks", "clusters", "streamed"),
    [
        (256, 64, 66, 124),  # 4096^3 on 132 SMs: 3.88 rounds, two stay whole
        (1024, 128, 66, 100),  # 8192^3: 15.5 rounds
        (66, 64, 66, 0),
        (132, 64, 66, 0),
        (60, 64, 66, 0),
        (67, COST_BLOCKS, 66, 0),  # saves less than it costs
    ],
)
def test_hand_worked_cases(tiles: int, blocks: int, clusters: int, streamed: int) -> None:
    assert streamed_tiles(tiles, blocks, clusters) == streamed
