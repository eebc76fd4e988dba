"""Swizzles: a permutation, its own inverse, free of bank conflicts where a plain tile is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.matmul.swizzle import SWIZZLES, Swizzle, column_conflicts, conflict_degree

every_mode = pytest.mark.parametrize("mode", SWIZZLES.values(), ids=SWIZZLES)


@every_mode
def test_a_swizzle_permutes_the_bytes_of_its_atom(mode: Swizzle) -> None:
    atom = range(8 * mode.span_bytes)
    assert sorted(mode.apply(o) for o in atom) == list(atom)


@given(st.sampled_from(list(SWIZZLES.values())), st.integers(0, 2**20))
def test_a_swizzle_is_its_own_inverse_and_keeps_chunk_and_128_byte_line(
    mode: Swizzle, offset: int
) -> None:
    moved = mode.apply(offset)
    assert mode.apply(moved) == offset
    assert moved % 16 == offset % 16
    assert moved // 128 == offset // 128


@given(st.sampled_from(list(SWIZZLES.values())), st.integers(0, 2**20), st.integers(0, 99))
def test_the_pattern_repeats_every_atom(mode: Swizzle, offset: int, atoms: int) -> None:
    later = atoms * 8 * mode.span_bytes
    assert mode.apply(offset + later) == mode.apply(offset) + later


@every_mode
def test_rows_and_columns_of_every_8x16_byte_tile_are_conflict_free(mode: Swizzle) -> None:
    width = mode.span_bytes
    for chunk in range(width // 16):
        assert column_conflicts(mode, width, chunk) == 1
    for row in range(64):
        first = row * width // 128 * 128  # the 128 contiguous bytes in which the row begins
        assert conflict_degree([mode.apply(first + 16 * c) for c in range(8)], 16) == 1


def test_without_a_swizzle_columns_conflict() -> None:
    # Rows of 128 bytes start in the same bank: all 8 rows collide. Rows of 64 and 32: 4 and 2.
    assert [column_conflicts(None, width, 0) for width in (128, 64, 32, 16)] == [8, 4, 2, 1]
    # The classic cure, a padded row, also works but breaks TMA's dense boxes.
    assert column_conflicts(None, 128 + 16, 0) == 1


def test_a_swizzle_of_the_wrong_width_conflicts() -> None:
    assert column_conflicts(SWIZZLES["64B"], 128, 0) == 2
    assert column_conflicts(SWIZZLES["32B"], 128, 0) == 4


def test_128_byte_mode_by_hand() -> None:
    # Row r holds logical chunk c at physical chunk c xor r.
    for row in range(8):
        for chunk in range(8):
            moved = SWIZZLES["128B"].apply(row * 128 + chunk * 16)
            assert moved == row * 128 + (chunk ^ row) * 16
    assert [s.mask for s in SWIZZLES.values()] == [0x80, 0x180, 0x380]


@pytest.mark.parametrize("ways", [1, 2, 4, 8, 16, 32])
def test_a_stride_of_n_words_is_an_n_way_conflict(ways: int) -> None:
    assert conflict_degree([lane * ways * 4 for lane in range(32)], 4) == ways


def test_broadcast_is_free_and_odd_strides_are_free() -> None:
    assert conflict_degree([64] * 32, 4) == 1
    assert conflict_degree([lane * 33 * 4 for lane in range(32)], 4) == 1
    assert conflict_degree([], 4) == 0


def test_wrong_accesses_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        conflict_degree([8], 16)
    with pytest.raises(ValueError, match="32 bytes"):
        conflict_degree([0], 32)
    with pytest.raises(ValueError, match="before"):
        SWIZZLES["128B"].apply(-16)
