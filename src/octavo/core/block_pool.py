"""The pool of KV blocks: who is free, how often each is held, and which content can be hit.

Every operation is O(1) per block. A free block keeps its content until it is allocated again, so
the free queue is also the LRU list of the prefix cache. Knows blocks, not requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from octavo.core.block_hash import ExtraKeys
from octavo.errors import ConfigError

NULL_BLOCK_ID = 0
ROOT_PREFIX_ID = 0


@dataclass(slots=True, eq=False)
class KVBlock:
    """One block. The fields after ref_count describe its content while it can be hit."""

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    """None: the content can't be hit."""
    token_ids: tuple[int, ...] = ()
    extra_keys: ExtraKeys = ()
    prefix_id: int = ROOT_PREFIX_ID
    """Names the exact content from position 0 to the end of this block; never reused."""
    parent_prefix_id: int = ROOT_PREFIX_ID
    """prefix_id of what stands before this block; ROOT_PREFIX_ID for the first block."""
    has_hidden: bool = False
    """The worker keeps the final hidden state of every position of this block."""
    prev_free: KVBlock | None = None
    next_free: KVBlock | None = None

    def holds(
        self, token_ids: tuple[int, ...], extra_keys: ExtraKeys, parent_prefix_id: int
    ) -> bool:
        """True if this is that content after that prefix: no hash is trusted."""
        return (
            self.parent_prefix_id == parent_prefix_id
            and self.token_ids == token_ids
            and self.extra_keys == extra_keys
        )


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

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ConfigError(f"a KV cache of {num_blocks} blocks: the null block and 1 are needed")
        self.enable_caching = enable_caching
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockQueue()
        for block in self.blocks[NULL_BLOCK_ID + 1 :]:
            self._free.append(block)
        self._prefix_map: dict[bytes, KVBlock] = {}
        self._last_prefix_id = ROOT_PREFIX_ID

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, cached content or not."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be hit."""
        return len(self._prefix_map)

    def allocate(self, num_blocks: int) -> list[KVBlock]:
        """Take the blocks that have been free the longest; only now is their content forgotten."""
        assert num_blocks <= self.num_free_blocks, "allocate() without checking num_free_blocks"
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
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
            if block.ref_count > 0:
                continue
            if block.block_hash is None:
                self._free.prepend(block)  # nothing to lose: reuse it before any cached content
            else:
                self._free.append(block)

    def lookup(
        self,
        block_hash: bytes,
        token_ids: tuple[int, ...],
        extra_keys: ExtraKeys,
        parent_prefix_id: int,
    ) -> KVBlock | None:
        """The block with exactly this content after exactly this prefix, or None."""
        block = self._prefix_map.get(block_hash)
        if block is None or not block.holds(token_ids, extra_keys, parent_prefix_id):
            return None
        return block

    def cache_block(
        self,
        block: KVBlock,
        block_hash: bytes,
        token_ids: tuple[int, ...],
        extra_keys: ExtraKeys,
        parent_prefix_id: int,
        has_hidden: bool,
    ) -> int:
        """Make a computed block hittable and return the prefix id of its content.

        Equal content that is mapped already stays, unless only the new block has hidden states.
        Other content under this hash (a collision, or a block whose parent was evicted and came
        back under a new prefix id, so that it can't be hit any more) gives way.
        """
        assert block.block_hash is None, f"block {block.block_id} is cached already"
        assert block.ref_count > 0, f"block {block.block_id} is cached but nobody holds it"
        mapped = self._prefix_map.get(block_hash)
        if mapped is not None and mapped.holds(token_ids, extra_keys, parent_prefix_id):
            prefix_id = mapped.prefix_id  # same content, same id: its children stay reachable
            if mapped.has_hidden or not has_hidden:
                return prefix_id
        else:
            self._last_prefix_id += 1
            prefix_id = self._last_prefix_id
        if mapped is not None:
            self._forget(mapped)
        block.block_hash, block.token_ids, block.extra_keys = block_hash, token_ids, extra_keys
        block.prefix_id, block.parent_prefix_id = prefix_id, parent_prefix_id
        block.has_hidden = has_hidden
        self._prefix_map[block_hash] = block
        return prefix_id

    def reset(self) -> bool:
        """Forget all content if no block is held; False, and nothing done, otherwise."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in list(self._prefix_map.values()):
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
        assert null.block_hash is None, "the null block is cached"
        for block in self.blocks[NULL_BLOCK_ID + 1 :]:
            name = f"block {block.block_id}"
            assert block.ref_count >= 0, f"{name}: ref_count {block.ref_count}"
            assert (block.ref_count == 0) == (block.block_id in free), (
                f"{name}: ref_count {block.ref_count}, in free queue: {block.block_id in free}"
            )
            if block.block_hash is None:
                stale = block.token_ids or block.prefix_id or block.has_hidden
                assert not stale, f"{name}: content without a hash"
            else:
                mapped = self._prefix_map.get(block.block_hash)
                assert mapped is block, f"{name}: has a hash but is not the mapped block"
                assert block.prefix_id > block.parent_prefix_id, f"{name}: parent came after it"
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        assert num_hashed == len(self._prefix_map), "the prefix map has entries without a block"
        assert self.enable_caching or not self._prefix_map, "caching is off but blocks are cached"

    def _forget(self, block: KVBlock) -> None:
        if block.block_hash is None:
            return
        del self._prefix_map[block.block_hash]
        block.block_hash = None
        block.token_ids = ()
        block.extra_keys = ()
        block.prefix_id = block.parent_prefix_id = ROOT_PREFIX_ID
        block.has_hidden = False
