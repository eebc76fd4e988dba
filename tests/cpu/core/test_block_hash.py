"""Block hashes: chained, seeded by a constant, extra keys tagged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.block_hash import hash_block, request_extra_keys
from tests.cpu.core.fakes import make_request

keys = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=3).map(tuple)
inputs = st.tuples(
    st.none() | st.binary(min_size=32, max_size=32),
    st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    keys,
)


def test_hash_is_the_same_in_every_process_and_release() -> None:
    """Replicas find each other's blocks; a changed constant here breaks stored prefixes."""
    expected = "eee3"
    assert hash_block(None, [1, 2, 3], (("salt", "x"),)).hex()[:4] == expected


@given(inputs, inputs)
def test_different_inputs_have_different_hashes(a: tuple, b: tuple) -> None:  # type: ignore[type-arg]
    assert (hash_block(*a) == hash_block(*b)) == (a == b)


def test_kinds_of_extra_keys_do_not_mix() -> None:
    """S20: a salt 'X' is not an adapter 'X', and text can't move from one key to the next."""
    assert hash_block(None, [1], (("salt", "X"),)) != hash_block(None, [1], (("adapter", "X"),))
    assert hash_block(None, [1], (("a", "bc"),)) != hash_block(None, [1], (("ab", "c"),))
    two = (("salt", "X"), ("adapter", "Y"))
    assert hash_block(None, [1], two) != hash_block(None, [1], (("salt", "Xadapter"), ("", "Y")))


def test_parent_decides() -> None:
    first = hash_block(None, [1, 2], ())
    assert hash_block(first, [3, 4], ()) != hash_block(None, [3, 4], ())
    assert hash_block(first, [3, 4], ()) != hash_block(hash_block(None, [2, 1], ()), [3, 4], ())


def test_salt_of_a_request_is_tagged_and_an_empty_salt_is_a_salt() -> None:
    assert request_extra_keys(make_request("r")) == ()
    assert request_extra_keys(make_request("r", cache_salt="")) == (("salt", ""),)
    assert request_extra_keys(make_request("r", cache_salt="X")) == (("salt", "X"),)


def test_salt_with_a_lone_surrogate_is_hashable() -> None:
    """JSON can carry one; it must not raise inside the engine loop."""
    assert hash_block(None, [1], (("salt", "\ud800"),)) != hash_block(None, [1], (("salt", "?"),))
