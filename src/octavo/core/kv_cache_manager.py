"""Which blocks each request holds, and how computed blocks become hits for the next request.

Owns the block tables; a request knows its tokens only. Knows nothing of steps: the scheduler says
when blocks are computed and when freed blocks may really return.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from octavo.config.kv_cache import KVCacheLayout
from octavo.core.block_hash import HashFunction, hash_block, request_extra_keys
from octavo.core.block_pool import NULL_BLOCK_ID, BlockPool, Content, KVBlock, Prefix
from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks found, opaque to the scheduler: equally many for each KV group."""

    _groups: tuple[tuple[KVBlock, ...], ...] = ()
    _prefix: Prefix | None = None

    def __len__(self) -> int:
        return len(self._groups[0]) if self._groups else 0

    def get_block_ids(self) -> list[int]:
        """Ids in table order, group after group."""
        return [block.block_id for group in self._groups for block in group]


NO_HITS = KVCacheBlocks()


@dataclass(slots=True)
class _BlockTable:
    groups: list[list[KVBlock]]
    """Of each KV group, equally long. What a window has passed is the null block."""
    num_passed: list[int]
    """Of each group: leading null blocks."""
    num_cached_blocks: int = 0
    """Leading blocks that were offered to the prefix map, hits included."""
    prefix: Prefix | None = None
    """Content of these leading blocks."""

    def held(self) -> Iterable[KVBlock]:
        """All blocks, tail first, so that the start of the prefix is reused last."""
        columns = zip(*(reversed(group) for group in self.groups), strict=True)
        return (block for column in columns for block in column if block.block_id != NULL_BLOCK_ID)


class KVCacheManager:
    """Block tables of all requests over one BlockPool."""

    def __init__(
        self,
        num_blocks: int,
        layout: KVCacheLayout,
        enable_caching: bool,
        hash_function: HashFunction = hash_block,
    ) -> None:
        self.layout, self.block_size = layout, layout.block_size
        self._num_groups = len(layout.windows)
        self.has_windows = layout.windows.count(None) < self._num_groups
        self.pool = BlockPool(num_blocks, enable_caching, self._num_groups)
        self._hash_function = hash_function
        self._tables: dict[str, _BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds."""
        return self.pool.num_free_blocks

    @property
    def holders(self) -> Collection[str]:
        """Ids of the requests that hold a table."""
        return self._tables.keys()

    def holds(self, request: Request) -> bool:
        """True if the request has a block table."""
        return request.request_id in self._tables

    def num_slots(self, request: Request) -> int:
        """Tokens that the request's tables cover."""
        table = self._tables.get(request.request_id)
        return 0 if table is None else len(table.groups[0]) * self.block_size

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks to add to the request's tables so that they cover this many tokens."""
        table = self._tables.get(request.request_id)
        num_needed = -(-num_tokens // self.block_size)
        if table is not None:
            num_needed = max(0, num_needed - len(table.groups[0]))
        return num_needed * self._num_groups

    def num_owed_blocks(
        self, request: Request, num_tokens: int, hits: KVCacheBlocks = NO_HITS
    ) -> int:
        """Blocks that it will take, at most at a time, until its tables cover this many tokens."""
        missing = self.num_missing_blocks(request, num_tokens) - len(hits) * self._num_groups
        if self.has_windows:
            held = sum(map(bool, hits.get_block_ids()))
            if (table := self._tables.get(request.request_id)) is not None:
                held += len(table.groups[0]) * self._num_groups - sum(table.num_passed)
            missing = min(missing, self.layout.peak_blocks(num_tokens) - held)
        return max(0, missing)

    def num_freeable_blocks(self, request: Request) -> int:
        """Blocks that only this request holds: what freeing it would really give."""
        table = self._tables.get(request.request_id)
        return 0 if table is None else sum(block.ref_count == 1 for block in table.held())

    def get_block_ids(self, request: Request) -> list[int]:
        """The request's block tables, group after group; empty if it holds nothing."""
        table = self._tables.get(request.request_id)
        return [] if table is None else [block.block_id for one in table.groups for block in one]

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix in full blocks, and its tokens; nothing is held yet.

        Of each group only the blocks count that the next token sees. The last token is never part of
        it: its hidden state is what the next token comes from. While prompt scores are owed only
        blocks with hidden states count, since the scores of cached positions are computed from those;
        they are kept with the first group.
        """
        windows = self.layout.windows
        needs_hidden = owes_prompt_scores(request)
        if not self.pool.enable_caching or (needs_hidden and windows[0] is not None):
            return NO_HITS, 0
        found: list[list[KVBlock]] = [[] for _ in windows]
        begins = [0] * len(windows)  # of the blocks that were found without a gap, by group
        num_hits, prefix, hit_prefix = 0, None, None
        for index in range((request.num_tokens - 1) // self.block_size):
            prefix = self.pool.find(*self._content(request, index, prefix))
            if prefix is None:
                break
            for group, block in enumerate(prefix.blocks):
                if block is None or (needs_hidden and group == 0 and not block.has_hidden):
                    begins[group], block = index + 1, self.pool.null_block
                found[group].append(block)
            if any(begin and window is None for begin, window in zip(begins, windows, strict=True)):
                break
            firsts = self._first_blocks((index + 1) * self.block_size)
            if all(begin <= first for begin, first in zip(begins, firsts, strict=True)):
                num_hits, hit_prefix = index + 1, prefix
        firsts = self._first_blocks(num_hits * self.block_size)
        groups = (
            (self.pool.null_block,) * first + tuple(blocks[first:num_hits])
            for first, blocks in zip(firsts, found, strict=True)
        )
        return KVCacheBlocks(tuple(groups), hit_prefix), num_hits * self.block_size

    def fits(
        self, request: Request, num_tokens: int, hits: KVCacheBlocks, num_reserved_blocks: int
    ) -> bool:
        """True if it could get to num_tokens and the reserved blocks would still be free."""
        needed = self.num_owed_blocks(request, num_tokens, hits) + _num_free(hits)
        return needed + num_reserved_blocks <= self.num_free_blocks

    def allocate_slots(
        self, request: Request, num_tokens: int, hits: KVCacheBlocks = NO_HITS
    ) -> list[int] | None:
        """Make the tables cover num_tokens; returns the appended ids (hits included), by group.

        None, and nothing changed, if too few blocks are free. Hits are only taken by a request
        that holds nothing.
        """
        num_new = self.num_missing_blocks(request, num_tokens) - len(hits) * self._num_groups
        if max(0, num_new) + _num_free(hits) > self.num_free_blocks:
            return None
        table = self._tables.get(request.request_id)
        if table is None:
            table = _BlockTable([[] for _ in self.layout.windows], [0] * self._num_groups)
            self._tables[request.request_id] = table
        start = len(table.groups[0])
        if len(hits):
            self._take_hits(table, hits)
        self.grow(request, max(0, num_new))
        return [block.block_id for blocks in table.groups for block in blocks[start:]]

    def grow(self, request: Request, num_new: int) -> list[int]:
        """Append so many free blocks, equally many to each of its tables; returns their ids, by group."""
        new = self.pool.allocate(num_new)
        each = num_new // self._num_groups
        for group, blocks in enumerate(self._tables[request.request_id].groups):
            blocks += new[group * each : (group + 1) * each]
        return [block.block_id for block in new]

    def _take_hits(self, table: _BlockTable, hits: KVCacheBlocks) -> None:
        assert not table.groups[0], "hits come before any other block of a request"
        table.num_cached_blocks, table.prefix = len(hits), hits._prefix
        table.num_passed = self._first_blocks(len(hits) * self.block_size)
        for blocks, group in zip(table.groups, hits._groups, strict=True):
            blocks += group
            for block in group:
                if block.block_id != NULL_BLOCK_ID:
                    self.pool.touch(block)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Offer the full blocks among the computed, known tokens to the prefix map.

        Then give back what windows have passed. Called when a step is settled, never when it is
        planned: a block that is not computed yet must not be hit, and a rejected draft computes
        nothing. Steps in flight start no earlier, so they read nothing of what is given back.
        """
        table = self._tables[request.request_id]
        if self.pool.enable_caching:
            num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
            if num_full > table.num_cached_blocks:
                self._offer(request, table, num_full)
        if self.has_windows:
            self._drop_passed(table, num_computed_tokens)

    def _offer(self, request: Request, table: _BlockTable, num_full: int) -> None:
        # Hidden states are kept for prompt positions only; a block counts if all of it has them.
        keeps_hidden = request.engine_request.sampling_params.prompt_logprobs is not None
        num_hidden_blocks = request.num_prompt_tokens // self.block_size if keeps_hidden else 0
        for index in range(table.num_cached_blocks, num_full):
            table.prefix = self.pool.name(*self._content(request, index, table.prefix))
            has_hidden = index < num_hidden_blocks
            for group, blocks in enumerate(table.groups):
                self.pool.cache_block(blocks[index], table.prefix, has_hidden and group == 0, group)
        table.num_cached_blocks = num_full

    def _drop_passed(self, table: _BlockTable, num_computed_tokens: int) -> None:
        for group, end in enumerate(self._first_blocks(num_computed_tokens)):
            start, blocks = table.num_passed[group], table.groups[group]
            if end > start:
                self.pool.free(blocks[start:end])
                blocks[start:end] = [self.pool.null_block] * (end - start)
                table.num_passed[group] = end

    def free(self, request: Request) -> list[KVBlock]:
        """Take the request's tables; the caller gives the blocks to `release` now or later.

        No-op without a table.
        """
        table = self._tables.pop(request.request_id, None)
        return list(table.held()) if table is not None else []

    def release(self, blocks: Iterable[KVBlock]) -> None:
        """Return blocks that `free` handed out."""
        self.pool.free(blocks)

    def check_integrity(self, elsewhere: Iterable[KVBlock] = ()) -> None:
        """The pool is sound and every reference belongs to a table or to `elsewhere`."""
        self.pool.check_integrity()
        counts = [0] * len(self.pool.blocks)
        for table in self._tables.values():
            length = len(table.groups[0])
            assert table.num_cached_blocks <= length, "more cached blocks than blocks"
            for blocks, passed in zip(table.groups, table.num_passed, strict=True):
                assert len(blocks) == length, "tables of one request differ in length"
                is_null = [block is self.pool.null_block for block in blocks]
                assert is_null == [index < passed for index in range(length)], "holes in a table"
            for block in table.held():
                counts[block.block_id] += 1
        for block in elsewhere:
            counts[block.block_id] += 1
        for block in self.pool.blocks:
            held = counts[block.block_id]
            name = f"block {block.block_id}"
            assert block.ref_count == held, f"{name}: ref_count {block.ref_count}, {held} holders"

    def _first_blocks(self, num_tokens: int) -> list[int]:
        """Of each group the first block that is seen after so many tokens."""
        return [self.layout.first_block(window, num_tokens) for window in self.layout.windows]

    def _content(
        self, request: Request, index: int, parent: Prefix | None
    ) -> tuple[bytes, Content]:
        """Hash and content of a full block. Hashes are computed once, those before it first."""
        prompt, output = request.engine_request.prompt_token_ids, request.output_token_ids
        start, end = index * self.block_size, (index + 1) * self.block_size
        begin, stop = max(0, start - len(prompt)), max(0, end - len(prompt))  # among the output
        token_ids = (*prompt[start:end], *output[begin:stop])
        extra_keys = request_extra_keys(request.engine_request)
        hashes = request.block_hashes
        if index == len(hashes):
            last = hashes[-1] if hashes else None
            hashes.append(self._hash_function(last, token_ids, extra_keys))
        return hashes[index], (parent, token_ids, extra_keys)


def _num_free(hits: KVCacheBlocks) -> int:
    """Hits that nobody holds: taking them takes free blocks."""
    blocks = (block for group in hits._groups for block in group)
    return sum(block.ref_count == 0 and block.block_id != NULL_BLOCK_ID for block in blocks)


def owes_prompt_scores(request: Request) -> bool:
    """True while prompt scores were asked for and some are undelivered; position 0 has none."""
    if request.engine_request.sampling_params.prompt_logprobs is None:
        return False
    return request.num_prompt_scores < request.num_prompt_tokens - 1
