"""The pool of KV blocks: who is free, how often each is held, and which content can be hit.

Every operation is O(1) per block. A free block keeps its content until it is allocated again, so
the free queue is also the LRU list of the prefix cache. Knows blocks, not requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from octavo.core.block_hash import ExtraKeys
from octavo.errors import ConfigError

NULL_BLOCK_ID = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Prefix:
    """The exact content from position 0 to the end of a block: one object for one content.

    It lives as long as a block that can be hit, a longer prefix or a block table refers to it, so
    that what a window has passed may be evicted, and what follows can still be found.
    """

    parent: Prefix | None
    """What stands before the last block; None: nothing."""
    token_ids: tuple[int, ...]
    """Of the last block."""
    extra_keys: ExtraKeys
    blocks: list[KVBlock | None]
    """For each KV group the block that can be hit."""


Content = tuple[Prefix | None, tuple[int, ...], ExtraKeys]
"""What makes a Prefix: parent, token_ids, extra_keys."""


@dataclass(slots=True, eq=False)
class KVBlock:
    """One block. The fields after ref_count describe its content while it can be hit."""

    block_id: int
    ref_count: int = 0
    prefix: Prefix | None = None
    """None: the content can't be hit."""
    group: int = 0
    """The KV group whose layers the content belongs to."""
    has_hidden: bool = False
    """The worker keeps the final hidden state of every position of this block."""
    prev_free: KVBlock | None = None
    next_free: KVBlock | None = None


class FreeBlockQueue:
    """Doubly linked list through the blocks themselves: any block leaves in O(1)."""

    def __init__(self) -> None:
        self._head = KVBlock(-1)  # sentinels spare every operation its end cases
        self._tail = KVBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: KVBlock) -> None:
        """Make it the last to be reused."""
        assert self._tail.prev_free is not None
        self._link(self._tail.prev_free, block, self._tail)

    def prepend(self, block: KVBlock) -> None:
        """Make it the first to be reused."""
        assert self._head.next_free is not None
        self._link(self._head, block, self._head.next_free)

    def popleft(self) -> KVBlock:
        """Take the block that has been free the longest."""
        block = self._head.next_free
        assert self._length > 0, "the free queue is empty"
        assert block is not None
        self.remove(block)
        return block

    def remove(self, block: KVBlock) -> None:
        """Take this block out, wherever it stands."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"block {block.block_id} is not free"
        assert after is not None
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def _link(self, before: KVBlock, block: KVBlock, after: KVBlock) -> None:
        assert block.prev_free is None, f"block {block.block_id} is already free"
        before.next_free = after.prev_free = block
        block.prev_free, block.next_free = before, after
        self._length += 1


class BlockPool:
    """All blocks of the KV cache. Block 0 is the null block: never allocated, held or freed."""

    def __init__(self, num_blocks: int, enable_caching: bool = True, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ConfigError(f"a KV cache of {num_blocks} blocks: the null block and 1 are needed")
        self.enable_caching = enable_caching
        self.num_groups = num_groups
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self._free = FreeBlockQueue()
        for block in self.blocks[NULL_BLOCK_ID + 1 :]:
            self._free.append(block)
        self._prefixes: WeakValueDictionary[bytes, Prefix] = WeakValueDictionary()
        self.num_cached_blocks = 0
        """Blocks whose content can be hit."""

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, cached content or not."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[KVBlock]:
        """Take the blocks that have been free the longest; only now is their content forgotten."""
        assert num_blocks <= self.num_free_blocks, "allocate() without checking num_free_blocks"
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            if block.prefix is not None:
                self._forget(block)
            block.ref_count = 1
        return blocks

    def touch(self, block: KVBlock) -> None:
        """One more holder, after a hit; a free block leaves the free queue."""
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1

    def free(self, blocks: Iterable[KVBlock]) -> None:
        """One holder less for each; give the blocks of a request tail first, as LRU order."""
        for block in blocks:
            assert block.ref_count > 0, f"block {block.block_id} is freed but nobody holds it"
            block.ref_count -= 1
            if block.ref_count == 0 and block.prefix is None:
                self._free.prepend(block)  # nothing to lose: reuse it before any cached content
            elif block.ref_count == 0:
                self._free.append(block)

    def find(self, block_hash: bytes, content: Content) -> Prefix | None:
        """Exactly this content after exactly that prefix, or None: no hash is trusted."""
        prefix = self._prefixes.get(block_hash)
        if prefix is None or prefix.parent is not content[0]:
            return None
        return prefix if (prefix.token_ids, prefix.extra_keys) == content[1:] else None

    def name(self, block_hash: bytes, content: Content) -> Prefix:
        """The same, made if need be. Other content under this hash can't be found any more."""
        prefix = self.find(block_hash, content)
        if prefix is None:
            prefix = self._prefixes[block_hash] = Prefix(*content, [None] * self.num_groups)
        return prefix

    def cache_block(
        self, block: KVBlock, prefix: Prefix, has_hidden: bool = False, group: int = 0
    ) -> None:
        """Make a computed block hittable.

        An older block with this content stays, unless only the new one has hidden states.
        """
        assert block.prefix is None, f"block {block.block_id} is cached already"
        assert block.ref_count > 0, f"block {block.block_id} is cached but nobody holds it"
        older = prefix.blocks[group]
        if older is not None:
            if older.has_hidden or not has_hidden:
                return
            self._forget(older)
        block.prefix, block.group, block.has_hidden = prefix, group, has_hidden
        prefix.blocks[group] = block
        self.num_cached_blocks += 1

    def reset(self) -> bool:
        """Forget all content if no block is held; False, and nothing done, otherwise."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self.blocks:
            self._forget(block)
        return True

    def check_integrity(self) -> None:
        """Walk the whole pool; AssertionError with the broken rule and the block."""
        free_ids = [block.block_id for block in self._free]
        free = set(free_ids)
        assert len(free_ids) == len(free) == len(self._free), "free queue: wrong length or a cycle"
        assert NULL_BLOCK_ID not in free, "the null block is in the free queue"
        null = self.blocks[NULL_BLOCK_ID]
        assert null.ref_count == 0, "the null block is held"
        assert null.prefix is None, "the null block is cached"
        for block in self.blocks[NULL_BLOCK_ID + 1 :]:
            name = f"block {block.block_id}"
            assert block.ref_count >= 0, f"{name}: ref_count {block.ref_count}"
            assert (block.ref_count == 0) == (block.block_id in free), (
                f"{name}: ref_count {block.ref_count}, in free queue: {block.block_id in free}"
            )
            if block.prefix is None:
                assert not block.has_hidden, f"{name}: hidden states without content"
            else:
                mapped = block.prefix.blocks[block.group]
                assert mapped is block, f"{name}: has content but is not the block to be hit"
        num_cached = sum(block.prefix is not None for block in self.blocks)
        assert num_cached == self.num_cached_blocks, "cached blocks miscounted"
        assert self.enable_caching or not num_cached, "caching is off but blocks are cached"
        for prefix in self._prefixes.values():
            for group, hit in enumerate(prefix.blocks):
                whole = hit is None or (hit.prefix is prefix and hit.group == group)
                assert whole, "a prefix names a block with other content"

    def _forget(self, block: KVBlock) -> None:
        if block.prefix is None:
            return
        block.prefix.blocks[block.group] = None
        block.prefix = None
        block.has_hidden = False
        self.num_cached_blocks -= 1
