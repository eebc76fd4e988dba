"""Paged attention in torch: the CPU path, and the oracle of every other backend.

Owns the canonical reduction. Keys are taken in splits of 256 at absolute positions from 0. A split's
partial (m, l, o) in fp32 is: scores over all 256 keys, their maximum, exp, one sum, one product with
V; invisible keys enter as exact zeros, so a split that is fully masked changes nothing. Partials are
merged in split order. Query rows are laid out in work items with a fixed number of rows, and every
product has a fixed shape per item; so the bits of a token's output do not depend on what else is in
the step, nor on whether the token was prefilled, chunked or decoded. With a sliding window the
splits before it are skipped, which changes no bit either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from octavo.attention.base import SPLIT_SIZE, CommonAttentionMetadata
from octavo.config.kv_cache import KVCacheSpec

logger = logging.getLogger(__name__)

SMALL_ROWS = 16
LARGE_ROWS = 128
ITEMS_PER_PASS = 64
"""Bounds the memory of a pass: K/V of one split for this many items."""
_LARGE_FROM_SMALL_ITEMS = 4
# Finite, so that a row without visible keys gives no NaN; the floor is above what is hidden.
_HIDDEN = 1e38
_PEAK_FLOOR = -1e30
# exp of less is not a normal number, and MKL takes 50 times longer for those.
_MIN_EXPONENT = -87.0


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """One 256-key split of a group, for the items from `first_item` on, `num_items` of them."""

    first_item: int
    """0 without a window; with one, the items before it see later keys only."""
    num_items: int
    num_full: int
    """The first of these, whose rows all see all 256 keys: no mask."""
    gather: torch.Tensor
    """(2 * num_items * num_kv_heads * 256,) int64 rows of the cache as (-1, head_dim): K, then V.
    Keys that no token of the item sees point at the null block, which is all zeros."""
    visible: torch.Tensor
    """(num_items - num_full, 1, rows, 256) fp32: 1 where the row sees the key, else 0."""
    hidden: torch.Tensor
    """The same shape, bool: where the row does not see the key."""


@dataclass(frozen=True, slots=True)
class ItemGroup:
    """Work items of one size, by falling last position. An item's tokens belong to one request."""

    tokens_per_item: int
    rows: int
    tokens: torch.Tensor
    """(items * tokens_per_item,) int64 rows of the query; padding repeats row 0."""
    source: torch.Tensor
    """(valid tokens,) int64 into `tokens`: which are no padding."""
    target: torch.Tensor
    """(valid tokens,) int64: the rows of the output that they are."""
    splits: list[SplitPlan]


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """One step, planned."""

    write_tokens: torch.Tensor | None
    """Tokens whose K/V is stored; None: all."""
    write_rows: torch.Tensor
    """Rows of the cache seen as (-1, num_kv_heads, head_dim) that receive K; V goes block_size on."""
    groups: list[ItemGroup]


class ReferenceAttention:
    """AttentionBackend in plain torch; see the module for the arithmetic.

    The null block (block 0) must stay all zeros; slots of any other block that no token of a
    request has written are never read, whatever they contain.
    """

    def __init__(
        self, num_heads: int, spec: KVCacheSpec, sliding_window: int | None = None
    ) -> None:
        """sliding_window: keys that a token sees, its own included; None: all up to its own."""
        self.spec = spec
        self.window = sliding_window
        self.group_size = num_heads // spec.num_kv_heads
        small = max(1, SMALL_ROWS // self.group_size)
        self._small = (small, _pad(small * self.group_size))
        large = max(small, LARGE_ROWS // self.group_size)
        self._large = (large, _pad(large * self.group_size))
        self._large_ok = rows_agree(self._small[1], self._large[1], spec.head_dim)

    def kv_cache_shape(self, num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """(num_blocks, K or V, block_size, num_kv_heads, head_dim)."""
        return (num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)

    def build_metadata(self, common: CommonAttentionMetadata) -> ReferenceMetadata:
        """Plan the step: vectorised over requests, one Python iteration a split."""
        slots = common.slot_mapping
        write_tokens = None
        if bool((slots < 0).any()):
            write_tokens = (slots >= 0).nonzero().flatten()
            slots = slots[write_tokens]
        size = self.spec.block_size
        write_rows = slots // size * (2 * size) + slots % size
        starts = common.query_start_loc.long()
        query_lens = starts.diff()
        use_large = query_lens > self._small[0] * (_LARGE_FROM_SMALL_ITEMS - 1)
        use_large &= self._large_ok
        groups: list[ItemGroup] = []
        for shape, chosen in ((self._small, ~use_large), (self._large, use_large)):
            requests = (chosen & (query_lens > 0)).nonzero().flatten()
            if len(requests):
                groups.extend(self._groups(common, starts, requests, *shape))
        return ReferenceMetadata(write_tokens, write_rows, groups)

    def with_tables(
        self, metadata: ReferenceMetadata, common: CommonAttentionMetadata
    ) -> ReferenceMetadata:
        """Made anew: rows of the cache are everywhere in it."""
        return self.build_metadata(common)

    def _groups(
        self,
        common: CommonAttentionMetadata,
        starts: torch.Tensor,
        requests: torch.Tensor,
        tokens_per_item: int,
        rows: int,
    ) -> Iterator[ItemGroup]:
        """Cut the tokens of `requests` into items and the items into passes."""
        begin, end = starts[requests], starts[requests + 1]
        counts = (end - begin + tokens_per_item - 1) // tokens_per_item
        owner = torch.repeat_interleave(counts)
        index = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
        first_token = begin[owner] + index * tokens_per_item
        num_tokens = (end[owner] - first_token).clamp(max=tokens_per_item)
        last = common.positions[first_token] + num_tokens - 1
        order = last.argsort(descending=True, stable=True)
        for part in torch.split(order, ITEMS_PER_PASS):
            tables = common.block_tables[requests[owner[part]]].long()
            yield self._group(
                tables, first_token[part], num_tokens[part], last[part], tokens_per_item, rows
            )

    def _group(
        self,
        tables: torch.Tensor,
        first_token: torch.Tensor,
        num_tokens: torch.Tensor,
        last: torch.Tensor,
        tokens_per_item: int,
        rows: int,
    ) -> ItemGroup:
        """tables: (items, max_blocks); the others: (items,) int64. Items by falling `last`."""
        step = torch.arange(tokens_per_item)
        real = step < num_tokens[:, None]
        tokens = torch.where(real, first_token[:, None] + step, 0).flatten()
        source = real.flatten().nonzero().flatten()
        first = last - num_tokens + 1
        # Position of each row; padding rows sit before position 0 and see no key.
        position = torch.where(real, first[:, None] + step, -1)
        position = position.repeat_interleave(self.group_size, dim=1)
        position = torch.nn.functional.pad(position, (0, rows - position.shape[1]), value=-1)
        splits = list(self._splits(tables, first, last, position[:, None, :, None]))
        return ItemGroup(tokens_per_item, rows, tokens, source, tokens[source], splits)

    def _splits(
        self,
        tables: torch.Tensor,
        first: torch.Tensor,
        last: torch.Tensor,
        position: torch.Tensor,
    ) -> Iterator[SplitPlan]:
        """first, last: (items,) positions of an item's tokens; position: (items, 1, rows, 1)."""
        # Padding rows make an item's mask partial, but nobody reads them: they may see anything.
        window = self.window
        lowest = torch.zeros_like(first) if window is None else (first - window + 1).clamp_(min=0)
        firsts, lasts, lowests = first.tolist(), last.tolist(), lowest.tolist()
        for start in range(min(lowests) // SPLIT_SIZE * SPLIT_SIZE, lasts[0] + 1, SPLIT_SIZE):
            end = sum(one >= start for one in lasts)
            begin = 0
            while begin < end and lowests[begin] >= start + SPLIT_SIZE:
                begin += 1
            if begin == end:
                continue
            full = begin
            while full < end and firsts[full] >= start + SPLIT_SIZE - 1:
                if window is not None and lasts[full] - window >= start:
                    break
                full += 1
            keys = torch.arange(start, start + SPLIT_SIZE)
            visible = keys <= position[full:end]
            if window is not None:
                visible &= keys > position[full:end] - window
            items = slice(begin, end)
            gather = self._gather_index(tables[items], lowest[items], last[items], keys)
            yield SplitPlan(begin, end - begin, full - begin, gather, visible.float(), ~visible)

    def _gather_index(
        self, tables: torch.Tensor, lowest: torch.Tensor, last: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Rows of the cache as (-1, head_dim), in the order (K or V, item, kv head, key)."""
        size, num_kv_heads = self.spec.block_size, self.spec.num_kv_heads
        column = (keys // size).clamp(max=tables.shape[1] - 1)
        row = tables[:, column] * (2 * size) + keys % size
        row = torch.where((keys >= lowest[:, None]) & (keys <= last[:, None]), row, 0)
        both = torch.stack((row, row + size))[:, :, None, :]
        return (both * num_kv_heads + torch.arange(num_kv_heads)[:, None]).flatten()

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ReferenceMetadata,
    ) -> None:
        """Store key and value, (T, num_kv_heads, head_dim) each, in the dtype of kv_cache."""
        if metadata.write_tokens is not None:
            key, value = key[metadata.write_tokens], value[metadata.write_tokens]
        if not math.isfinite(value.sum(dtype=torch.float32).item()):
            key, value = contain_values(key, value)
        rows = kv_cache.view(-1, self.spec.num_kv_heads, self.spec.head_dim)
        rows.index_copy_(0, metadata.write_rows, key)
        rows.index_copy_(0, metadata.write_rows + self.spec.block_size, value)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ReferenceMetadata,
        scale: float,
    ) -> torch.Tensor:
        """See AttentionBackend. Computes in fp32, returns the dtype of `query`."""
        out = torch.zeros_like(query)
        for group in metadata.groups:
            result = self._attend(query, kv_cache.view(-1, self.spec.head_dim), group, scale)
            out.index_copy_(0, group.target, result.to(query.dtype))
        return out

    def _attend(
        self, query: torch.Tensor, cache_rows: torch.Tensor, group: ItemGroup, scale: float
    ) -> torch.Tensor:
        """Attention of one group of items: (valid tokens, num_heads, head_dim) fp32."""
        num_kv_heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        tokens, used = group.tokens_per_item, group.tokens_per_item * self.group_size
        items = len(group.tokens) // tokens
        picked = query.index_select(0, group.tokens).float().mul_(scale)
        picked = picked.view(items, tokens, num_kv_heads, self.group_size, head_dim)
        q = picked.new_zeros(items, num_kv_heads, group.rows, head_dim)
        q[:, :, :used].view(items, num_kv_heads, tokens, self.group_size, head_dim).copy_(
            picked.transpose(1, 2)
        )
        splits = iter(group.splits)
        if self.window is None:
            peak, total, out = _split_partial(q, cache_rows, next(splits))
        else:  # the first split need not be that of all items: begin with what changes nothing
            total, out = q.new_zeros(*q.shape[:3], 1), torch.zeros_like(q)
            peak = torch.full_like(total, _PEAK_FLOOR)
        for split in splits:
            part = slice(split.first_item, split.first_item + split.num_items)
            peak_s, total_s, out_s = _split_partial(q[part], cache_rows, split)
            highest = torch.maximum(peak[part], peak_s)
            old, new = _exp_(peak[part] - highest), _exp_(peak_s - highest)
            total[part] = total[part].mul_(old).add_(total_s.mul_(new))
            out[part] = out[part].mul_(old).add_(out_s.mul_(new))
            peak[part] = highest
        result = out.div_(total)[:, :, :used]
        result = result.view(items, num_kv_heads, tokens, self.group_size, head_dim)
        flat = result.transpose(1, 2).reshape(items * tokens, -1, head_dim)
        return flat.index_select(0, group.source)


def _split_partial(
    q: torch.Tensor, cache_rows: torch.Tensor, split: SplitPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax of one split, not normalised.

    q: (num_items, num_kv_heads, rows, head_dim) fp32, scaled; cache_rows: (-1, head_dim).
    Returns peak and total (num_items, num_kv_heads, rows, 1) and out like q, fp32.
    """
    items, num_kv_heads, rows, head_dim = q.shape
    gathered = cache_rows.index_select(0, split.gather).float()
    keys, values = gathered.view(2, items * num_kv_heads, SPLIT_SIZE, head_dim)
    scores = torch.bmm(q.reshape(-1, rows, head_dim), keys.transpose(1, 2))
    scores = scores.view(items, num_kv_heads, rows, SPLIT_SIZE)
    if split.num_full < items:
        scores[split.num_full :].masked_fill_(split.hidden, -_HIDDEN)
    peak = scores.amax(-1, keepdim=True).clamp_(min=_PEAK_FLOOR)
    weights = _exp_(scores.sub_(peak))
    if split.num_full < items:
        weights[split.num_full :].mul_(split.visible)
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights.view(-1, rows, SPLIT_SIZE), values)
    return peak, total, out.view(items, num_kv_heads, rows, head_dim)


def contain_values(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """key, value: (T, num_kv_heads, head_dim). Where V is not finite, V becomes 0 and K NaN.

    Rows that do not see a key give it weight zero, and zero times NaN is NaN. K is hidden from them by a
    mask instead, and still brings NaN to every row that sees the key.
    """
    broken = ~value.isfinite().all(-1, keepdim=True)
    return key.masked_fill(broken, torch.nan), value.masked_fill(broken, 0.0)


def _exp_(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_(min=_MIN_EXPONENT).exp_()


def _pad(rows: int) -> int:
    return (rows + SMALL_ROWS - 1) // SMALL_ROWS * SMALL_ROWS


def rows_agree(small: int, large: int, head_dim: int) -> bool:
    """Whether this machine's batched products give a row the same bits in items of either size.

    Checked on random data at two row positions; if not, only small items are used.
    """
    generator = torch.Generator().manual_seed(0)
    count = small * large
    q = torch.randn(count, head_dim, generator=generator)
    keys = torch.randn(2, SPLIT_SIZE, head_dim, generator=generator)

    def attend(rows: torch.Tensor, size: int) -> torch.Tensor:
        items = rows.view(-1, size, head_dim)
        scores = torch.bmm(items, keys[0].T.expand(len(items), -1, -1))
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        out = torch.bmm(weights, keys[1].expand(len(items), -1, -1))
        return torch.cat((out, weights.sum(-1, keepdim=True)), -1).view(count, -1)

    expected = attend(q, small)
    moved = attend(q.roll(7, 0), large).roll(-7, 0)
    agree = torch.equal(expected, attend(q, large)) and torch.equal(expected, moved)
    if not agree:
        logger.warning(
            "attention items of %d and %d rows differ in their last bits on this machine; "
            "prefill uses the small ones and is slower",
            small,
            large,
        )
    return agree
