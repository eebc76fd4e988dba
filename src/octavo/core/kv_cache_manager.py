"""Which blocks each request holds, and how computed blocks become hits for the next request.

Owns the block tables; a request knows its tokens only. Knows nothing of steps: the scheduler says
when blocks are computed and when freed blocks may really return.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from octavo.core.block_hash import HashFunction, hash_block, request_extra_keys
from octavo.core.block_pool import ROOT_PREFIX_ID, BlockPool, KVBlock
from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks found or held, opaque to the scheduler."""

    _blocks: tuple[KVBlock, ...] = ()

    def __len__(self) -> int:
        return len(self._blocks)

    def get_block_ids(self) -> list[int]:
        """Ids in table order."""
        return [block.block_id for block in self._blocks]


@dataclass(slots=True)
class _BlockTable:
    blocks: list[KVBlock] = field(default_factory=list)
    num_cached_blocks: int = 0
    """Leading blocks that were offered to the prefix map, hits included."""
    prefix_id: int = ROOT_PREFIX_ID
    """Content id of these leading blocks."""


class KVCacheManager:
    """Block tables of all requests over one BlockPool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool,
        hash_function: HashFunction = hash_block,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_caching)
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

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks to add to the request's table so that it holds this many tokens."""
        table = self._tables.get(request.request_id)
        num_needed = -(-num_tokens // self.block_size)
        return num_needed if table is None else max(0, num_needed - len(table.blocks))

    def num_freeable_blocks(self, request: Request) -> int:
        """Blocks that only this request holds: what freeing it would really give."""
        return sum(block.ref_count == 1 for block in self._blocks_of(request))

    def get_block_ids(self, request: Request) -> list[int]:
        """The request's block table; empty if it holds nothing."""
        return [block.block_id for block in self._blocks_of(request)]

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix in full blocks, and its tokens; nothing is held yet.

        The last token is never part of it: its hidden state is what the next token comes from.
        While prompt scores are owed only blocks with hidden states count, since the scores of
        cached positions are computed from those.
        """
        if not self.pool.enable_caching:
            return KVCacheBlocks(), 0
        extra_keys = request_extra_keys(request.engine_request)
        needs_hidden = owes_prompt_scores(request)
        hits: list[KVBlock] = []
        prefix_id = ROOT_PREFIX_ID
        for index in range((request.num_tokens - 1) // self.block_size):
            token_ids = self._block_token_ids(request, index)
            block_hash = self._block_hash(request, index, token_ids)
            block = self.pool.lookup(block_hash, token_ids, extra_keys, prefix_id)
            if block is None or (needs_hidden and not block.has_hidden):
                break
            hits.append(block)
            prefix_id = block.prefix_id
        return KVCacheBlocks(tuple(hits)), len(hits) * self.block_size

    def fits(
        self, request: Request, num_tokens: int, hits: KVCacheBlocks, num_reserved_blocks: int
    ) -> bool:
        """True if num_tokens could be allocated and the reserved blocks would still be free."""
        needed = self._num_taken_from_free(request, num_tokens, hits)
        return needed + num_reserved_blocks <= self.num_free_blocks

    def allocate_slots(
        self, request: Request, num_tokens: int, hits: KVCacheBlocks | None = None
    ) -> list[int] | None:
        """Make the table hold num_tokens; returns the appended ids (hits included).

        None, and nothing changed, if too few blocks are free. Hits are only taken by a request
        that holds nothing.
        """
        hits = hits or KVCacheBlocks()
        if self._num_taken_from_free(request, num_tokens, hits) > self.num_free_blocks:
            return None
        table = self._tables.setdefault(request.request_id, _BlockTable())
        assert not len(hits) or not table.blocks, "hits come before any other block of a request"
        for block in hits._blocks:
            self.pool.touch(block)
            table.blocks.append(block)
            table.num_cached_blocks += 1
            table.prefix_id = block.prefix_id
        new = self.pool.allocate(self.num_missing_blocks(request, num_tokens))
        table.blocks += new
        return hits.get_block_ids() + [block.block_id for block in new]

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Offer the full blocks among the computed, known tokens to the prefix map.

        Called when a step is settled, never when it is planned: a block that is not computed yet
        must not be hit.
        """
        if not self.pool.enable_caching:
            return
        table = self._tables[request.request_id]
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= table.num_cached_blocks:
            return
        extra_keys = request_extra_keys(request.engine_request)
        # Hidden states are kept for prompt positions only; a block counts if all of it has them.
        keeps_hidden = request.engine_request.sampling_params.prompt_logprobs is not None
        num_hidden_blocks = request.num_prompt_tokens // self.block_size if keeps_hidden else 0
        for index in range(table.num_cached_blocks, num_full):
            token_ids = self._block_token_ids(request, index)
            table.prefix_id = self.pool.cache_block(
                table.blocks[index],
                self._block_hash(request, index, token_ids),
                token_ids,
                extra_keys,
                table.prefix_id,
                has_hidden=index < num_hidden_blocks,
            )
        table.num_cached_blocks = num_full

    def free(self, request: Request) -> list[KVBlock]:
        """Take the request's table; the caller gives the blocks to `release` now or later.

        Tail first, so that the start of the prefix is reused last. No-op without a table.
        """
        table = self._tables.pop(request.request_id, None)
        return table.blocks[::-1] if table is not None else []

    def release(self, blocks: Iterable[KVBlock]) -> None:
        """Return blocks that `free` handed out."""
        self.pool.free(blocks)

    def check_integrity(self, elsewhere: Iterable[KVBlock] = ()) -> None:
        """The pool is sound and every reference belongs to a table or to `elsewhere`."""
        self.pool.check_integrity()
        counts = [0] * len(self.pool.blocks)
        for table in self._tables.values():
            assert table.num_cached_blocks <= len(table.blocks), "more cached blocks than blocks"
            for block in table.blocks:
                counts[block.block_id] += 1
        for block in elsewhere:
            counts[block.block_id] += 1
        for block in self.pool.blocks:
            held = counts[block.block_id]
            assert block.ref_count == held, (
                f"block {block.block_id}: ref_count {block.ref_count} but {held} holders"
            )

    def _blocks_of(self, request: Request) -> list[KVBlock]:
        table = self._tables.get(request.request_id)
        return table.blocks if table is not None else []

    def _num_taken_from_free(self, request: Request, num_tokens: int, hits: KVCacheBlocks) -> int:
        free_hits = sum(block.ref_count == 0 for block in hits._blocks)
        return max(0, self.num_missing_blocks(request, num_tokens) - len(hits)) + free_hits

    def _block_token_ids(self, request: Request, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        end = start + self.block_size
        prompt = request.engine_request.prompt_token_ids
        if end <= len(prompt):
            return tuple(prompt[start:end])
        output = request.output_token_ids
        split = len(prompt)
        return (*prompt[start:end], *output[max(0, start - split) : end - split])

    def _block_hash(self, request: Request, index: int, token_ids: tuple[int, ...]) -> bytes:
        hashes = request.block_hashes
        if index == len(hashes):
            parent = hashes[-1] if hashes else None
            extra_keys = request_extra_keys(request.engine_request)
            hashes.append(self._hash_function(parent, token_ids, extra_keys))
        return hashes[index]


def owes_prompt_scores(request: Request) -> bool:
    """True while prompt scores were asked for and some are undelivered; position 0 has none."""
    if request.engine_request.sampling_params.prompt_logprobs is None:
        return False
    return request.num_prompt_scores < request.num_prompt_tokens - 1
