"""BlockPool: LRU order, reference counts, exact hits, O(1) per block."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.core.block_pool import BlockPool, FreeBlockQueue, KVBlock, Prefix
from octavo.errors import ConfigError


def ids(blocks: list[KVBlock]) -> list[int]:
    return [block.block_id for block in blocks]


Tokens = tuple[int, ...]


def key(parent: Prefix | None, tokens: Tokens, **kw: Any) -> dict[str, Any]:
    block_hash = kw.get("block_hash", repr((id(parent), tokens)).encode())
    return {"block_hash": block_hash, "content": (parent, tokens, kw.get("extra_keys", ()))}


def cache(
    pool: BlockPool,
    block: KVBlock,
    tokens: Tokens,
    parent: Prefix | None = None,
    has_hidden: bool = False,
    group: int = 0,
    **kw: Any,
) -> Prefix:
    prefix = pool.name(**key(parent, tokens, **kw))
    pool.cache_block(block, prefix, has_hidden, group)
    return prefix


def find(
    pool: BlockPool, tokens: Tokens, parent: Prefix | None = None, group: int = 0, **kw: Any
) -> KVBlock | None:
    prefix = pool.find(**key(parent, tokens, **kw))
    return None if prefix is None else prefix.blocks[group]


def test_queue_keeps_order_and_lets_any_block_leave() -> None:
    queue = FreeBlockQueue()
    blocks = [KVBlock(index) for index in range(5)]
    for block in blocks[:4]:
        queue.append(block)
    queue.prepend(blocks[4])
    queue.remove(blocks[2])
    assert ids(list(queue)) == [4, 0, 1, 3]
    assert queue.popleft() is blocks[4]
    assert len(queue) == 3


def test_queue_refuses_double_insert_and_foreign_removal() -> None:
    queue = FreeBlockQueue()
    block = KVBlock(1)
    queue.append(block)
    with pytest.raises(AssertionError, match="already free"):
        queue.append(block)
    with pytest.raises(AssertionError, match="not free"):
        queue.remove(KVBlock(2))


def test_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert ids(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_pool_without_usable_block_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        BlockPool(1)


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.free(blocks)


def test_oldest_cached_content_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(5)
    first = pool.allocate(2)
    parent = cache(pool, first[0], (1,))
    cache(pool, first[1], (2,), parent)
    second = pool.allocate(1)
    cache(pool, second[0], (3,))
    pool.free(first[::-1])
    pool.free(second)
    taken = pool.allocate(2)  # the block never used, then the tail of the first
    assert ids(taken) == [4, first[1].block_id]
    assert find(pool, (1,)) is first[0]
    assert find(pool, (2,), parent) is None
    assert find(pool, (3,)) is second[0]


def test_uncached_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    cache(pool, blocks[0], (1,))
    pool.free(blocks)
    assert blocks[0] not in pool.allocate(2)
    assert find(pool, (1,)) is blocks[0]


def test_content_survives_until_reuse_and_eviction_drops_content_and_hidden() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    cache(pool, block, (1,), has_hidden=True)
    pool.free([block])
    assert find(pool, (1,)) is block
    pool.allocate(1)
    assert find(pool, (1,)) is None
    assert (block.prefix, block.has_hidden) == (None, False)


def test_a_hit_takes_a_block_out_of_the_free_queue() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    cache(pool, block, (1,))
    pool.free([block])
    pool.touch(block)
    pool.touch(block)
    assert (block.ref_count, pool.num_free_blocks) == (2, 1)
    pool.free([block])
    assert pool.num_free_blocks == 1
    pool.free([block])
    assert pool.num_free_blocks == 2
    pool.check_integrity()


def test_hit_compares_tokens_extra_keys_and_parent_not_just_the_hash() -> None:
    """S19, S20: with one hash for everything each part alone must prevent a hit."""
    pool = BlockPool(4)
    one = {"block_hash": b"same"}
    [block] = pool.allocate(1)
    before, other = Prefix(None, (7,), (), [None]), Prefix(None, (7,), (), [None])
    cache(pool, block, (1, 2), before, extra_keys=(("salt", "X"),), **one)
    assert find(pool, (1, 2), before, extra_keys=(("salt", "X"),), **one) is block
    assert find(pool, (1, 3), before, extra_keys=(("salt", "X"),), **one) is None
    assert find(pool, (1, 2), other, extra_keys=(("salt", "X"),), **one) is None
    assert find(pool, (1, 2), before, extra_keys=(("adapter", "X"),), **one) is None
    assert find(pool, (1, 2), before, **one) is None


def test_same_tokens_after_another_parent_are_another_content() -> None:
    """S19: own tokens are not enough, [A, B] and [C, B] share no K/V for B."""
    pool = BlockPool(6)
    one = {"block_hash": b"same"}
    a, b, c = pool.allocate(3)
    after_a = cache(pool, a, (1,), block_hash=b"a")
    after_c = cache(pool, c, (3,), block_hash=b"c")
    cache(pool, b, (2,), after_a, **one)
    assert find(pool, (2,), after_a, **one) is b
    assert find(pool, (2,), after_c, **one) is None


def test_a_child_is_found_although_its_parent_was_evicted() -> None:
    """A window passes the parent; the child's content still has a name, by all its tokens."""
    pool = BlockPool(4)
    parent, child = pool.allocate(2)
    cache(pool, child, (2,), cache(pool, parent, (1,)))
    pool.free([parent])
    pool.allocate(2)  # the fresh block, then the parent: its content is gone, the child's is not
    assert parent.prefix is None
    again = pool.find(**key(None, (1,)))
    assert again is not None
    assert again.blocks == [None]
    assert find(pool, (2,), again) is child


def test_a_name_that_nobody_uses_is_forgotten() -> None:
    pool = BlockPool(4)
    parent, child = pool.allocate(2)
    cache(pool, child, (2,), cache(pool, parent, (1,)))
    pool.free([child, parent])
    pool.allocate(3)
    assert pool.find(**key(None, (1,))) is None
    assert len(pool._prefixes) == 0


def test_a_long_chain_of_names_ends_without_recursion() -> None:
    pool, prefix = BlockPool(2), None
    for index in range(200_000):
        prefix = pool.name(b"%d" % index, (prefix, (index,), ()))
    prefix = None
    assert len(pool._prefixes) == 0


def test_groups_have_blocks_of_their_own_for_one_content() -> None:
    pool = BlockPool(4, num_groups=2)
    first, second = pool.allocate(2)
    prefix = cache(pool, first, (1,), group=0)
    assert find(pool, (1,), group=1) is None
    assert cache(pool, second, (1,), group=1) is prefix
    assert prefix.blocks == [first, second]
    pool.check_integrity()
    pool.free([first])
    pool.allocate(2)
    assert prefix.blocks == [None, second]


def test_older_block_stays_mapped_unless_only_the_new_one_has_hidden_states() -> None:
    pool = BlockPool(6)
    old, same, scored, child = pool.allocate(4)
    prefix = cache(pool, old, (1,))
    cache(pool, child, (2,), prefix)
    assert cache(pool, same, (1,)) is prefix
    assert find(pool, (1,)) is old
    assert cache(pool, scored, (1,), has_hidden=True) is prefix
    assert find(pool, (1,)) is scored
    assert old.prefix is None
    assert find(pool, (2,), prefix) is child, "the children stay reachable"
    pool.check_integrity()


def test_reset_forgets_everything_but_only_when_nothing_is_held() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    cache(pool, block, (1,))
    assert not pool.reset()
    assert find(pool, (1,)) is block
    pool.free([block])
    assert pool.reset()
    assert find(pool, (1,)) is None
    pool.check_integrity()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.popleft(), "in free queue: False"),
        (lambda pool: setattr(pool.blocks[2], "ref_count", 1), "in free queue: True"),
        (lambda pool: setattr(pool.blocks[2], "has_hidden", True), "hidden states without content"),
        (
            lambda pool: setattr(pool.blocks[2], "prefix", Prefix(None, (), (), [None])),
            "not the block to be hit",
        ),
        (lambda pool: setattr(pool, "num_cached_blocks", 1), "miscounted"),
        (lambda pool: pool._free.append(pool.blocks[0]), "null block is in the free queue"),
        (lambda pool: setattr(pool.blocks[0], "ref_count", 1), "null block is held"),
    ],
)
def test_integrity_check_names_the_damage(
    damage: Callable[[BlockPool], object], message: str
) -> None:
    pool = BlockPool(4)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def count_lines(function: Callable[[], object]) -> int:
    """Lines of Python executed: loops and calls alike, whatever the machine."""
    count = 0

    def trace(frame, event, argument):  # type: ignore[no-untyped-def]
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def work_of_one_cycle(num_blocks: int) -> int:
    pool = BlockPool(num_blocks)
    held = pool.allocate(num_blocks // 2)
    for index, block in enumerate(held):
        cache(pool, block, (index,))
    pool.free(held)

    def cycle() -> None:
        hit = find(pool, (3,))
        assert hit is not None
        pool.touch(hit)
        [block] = pool.allocate(1)
        pool.cache_block(block, pool.name(b"new", (None, (-1,), ())))
        pool.free([hit, block])

    return count_lines(cycle)


def test_cost_of_a_block_does_not_depend_on_the_pool() -> None:
    """Every operation is O(1): the same lines run for 16 blocks and for 20,000."""
    assert work_of_one_cycle(16) == work_of_one_cycle(20_000)


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders take, share, cache and free blocks; a dict of exact prefixes is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.holders: list[list[KVBlock]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @precondition(lambda self: self.pool.num_free_blocks > 0)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        blocks = self.pool.allocate(data.draw(st.integers(1, self.pool.num_free_blocks)))
        assert all(block.ref_count == 1 and block.prefix is None for block in blocks)
        for block in blocks:
            self.content.pop(block.block_id, None)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=8, max_size=8))
    def compute(self, data: st.DataObject, tokens: list[int]) -> None:
        """Fill a holder's blocks with one token each; the hash has one value for everything."""
        blocks = data.draw(st.sampled_from(self.holders))
        if any(block.block_id in self.content for block in blocks):
            return
        parent: Prefix | None = None
        hidden = data.draw(st.booleans())
        for index, block in enumerate(blocks):
            self.content[block.block_id] = tuple(tokens[: index + 1])
            hash_value = bytes([index % data.draw(st.integers(1, 8))])
            parent = self.pool.name(hash_value, (parent, (tokens[index],), ()))
            self.pool.cache_block(block, parent, hidden)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=8, max_size=8), data=st.data())
    def hit(self, tokens: list[int], data: st.DataObject) -> None:
        """Whatever is found must hold exactly the prefix asked for."""
        found: list[KVBlock] = []
        parent: Prefix | None = None
        for index, token in enumerate(tokens):
            for value in range(8):
                prefix = self.pool.find(bytes([value]), (parent, (token,), ()))
                if prefix is not None and (block := prefix.blocks[0]) is not None:
                    break
            else:
                break
            assert self.content[block.block_id] == tuple(tokens[: index + 1])
            found.append(block)
            parent = prefix
        if found and data.draw(st.booleans()):
            for block in found:
                self.pool.touch(block)
            self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.free(reversed(self.holders.pop(index)))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.holders)
        if not self.holders:
            assert self.pool.num_cached_blocks == 0

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity()
        held = {block.block_id for blocks in self.holders for block in blocks}
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks - len(held)


BlockPoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestBlockPoolMachine = BlockPoolMachine.TestCase
