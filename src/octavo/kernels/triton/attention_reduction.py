"""The reduction of paged attention, the same for prefill, chunks, decode and verification.

Keys are taken in tiles of 64 and splits of 256 at absolute positions from 0. A split starts from an
empty softmax state (peak, total, out), walks over its tiles, and is merged into the row's state; splits
are merged in rising order, by `merge` wherever they were computed. A key that a row does not see enters
as an exact zero and leaves the state as it was, so tiles and splits that nobody sees may be skipped.
All sums over keys or dimensions are chains of MMAs, whose bits do not depend on tile or instruction
(tests/gpu/test_mma_equal.py); the total of the weights is one, too, against a matrix of ones. What is
left is maxima and element-wise. So the bits of a row do not depend on the tile that it is in.

Rows of a tile are (token, head of the group) pairs of one request and kv head.
"""

from __future__ import annotations

from octavo.kernels.triton.attention_plan import SPLIT_SIZE
from octavo.kernels.triton.lang import tl, triton

TILE_SIZE = 64
"""Keys of one step of the online softmax."""
SPLIT = tl.constexpr(SPLIT_SIZE)
TILE = tl.constexpr(TILE_SIZE)
SPLIT_TILES = tl.constexpr(SPLIT_SIZE // TILE_SIZE)

# Columns of the matrix of ones.
_ONES = tl.constexpr(8)
# The peak of a row that has seen no key. Finite, so that no difference of peaks is NaN.
_FLOOR = tl.constexpr(-1e30)


@triton.jit
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The softmax state of rows that have seen no key: peak, total, out."""
    peak = tl.full((ROWS,), _FLOOR, tl.float32)
    return peak, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIM), tl.float32)


@triton.jit
def _empty_split(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The same within a split, where the total is a product with ones: (ROWS, 8), equal columns."""
    peak = tl.full((ROWS,), _FLOOR, tl.float32)
    return peak, tl.zeros((ROWS, _ONES), tl.float32), tl.zeros((ROWS, DIM), tl.float32)


@triton.jit
def merge(peak, total, out, peak_s, total_s, out_s):
    """The state of rows after one more split. Its roundings are fixed: each fma is written out."""
    highest = tl.maximum(peak, peak_s)
    old, new = tl.exp2(peak - highest), tl.exp2(peak_s - highest)
    total = tl.fma(total, old, total_s * new)
    out = tl.fma(out, old[:, None], out_s * new[:, None])
    return highest, total, out


@triton.jit
def _keys(tile, first_key, end_key):
    """(64,) int32: positions of a tile's keys. Those that no row sees give way to one that a row does.

    So nothing that this request has not written is read, and nothing needs a mask: the weight of such
    a key is zero.
    """
    key = tile * TILE.value + tl.arange(0, TILE)
    return tl.maximum(tl.minimum(key, end_key - 1), first_key)


@triton.jit
def _load_tile(place, SHAPE: tl.constexpr):
    """(64, block_dim) of K or V, with zeros past head_dim."""
    if SHAPE.head_dim < SHAPE.block_dim:
        inside = tl.arange(0, SHAPE.block_dim)[None, :] < SHAPE.head_dim
        return tl.load(place, mask=inside, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _walk(
    query, position, first_tile, end_tile, seen_by_all, first_key, end_key, table, keys,
    block_stride, scale, ROWS: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """State of rows after tiles of keys. Before tile `seen_by_all`, every row sees every key."""
    whole_peak, whole_total, whole_out = empty_state(ROWS, SHAPE.block_dim)
    peak, total, out = _empty_split(ROWS, SHAPE.block_dim)
    ones = tl.full((TILE, _ONES), 1.0, tl.float32).to(query.dtype)
    columns = keys + tl.arange(0, SHAPE.block_dim)[None, :]
    ids = tl.load(table + (_keys(first_tile, first_key, end_key) >> SHAPE.block_shift))
    for tile in tl.range(first_tile, end_tile):
        within = (_keys(tile, first_key, end_key) & (SHAPE.block_size - 1)) * SHAPE.head_dim
        place = columns + (ids.to(tl.int64) * block_stride + within)[:, None]
        # One tile ahead, so that the addresses of K and V wait for no load.
        ids = tl.load(table + (_keys(tile + 1, first_key, end_key) >> SHAPE.block_shift))
        score = tl.dot(query, tl.trans(_load_tile(place, SHAPE)))
        if tile >= seen_by_all:
            key = (tile * TILE.value + tl.arange(0, TILE))[None, :]
            seen = key <= position[:, None]
            if SHAPE.window:
                seen = seen & (key > position[:, None] - SHAPE.window)
            score = tl.where(seen, score, float("-inf"))
        highest = tl.max(score, 1) * scale
        # The state is first touched here, where the wait for the scores was one for it, too.
        if tile % SPLIT_TILES.value == 0:
            whole_peak, whole_total, whole_out = merge(
                whole_peak, whole_total, whole_out, peak, tl.max(total, 1), out
            )
            peak, total, out = _empty_split(ROWS, SHAPE.block_dim)
            peak = tl.maximum(peak, highest)
        else:
            highest = tl.maximum(peak, highest)
            old = tl.exp2(peak - highest)[:, None]
            peak, total, out = highest, total * old, out * old
        weight = tl.exp2(tl.fma(score, scale, -peak[:, None])).to(query.dtype)
        place += SHAPE.num_kv_heads * SHAPE.block_size * SHAPE.head_dim
        total = tl.dot(weight, ones, total)
        out = tl.dot(weight, _load_tile(place, SHAPE), out)
    return merge(whole_peak, whole_total, whole_out, peak, tl.max(total, 1), out)


@triton.jit
def _rows(start, row, query_len, head, stride, SHAPE: tl.constexpr):
    """Offsets (rows, block_dim) int64 of rows in (tokens, heads, head_dim), and which exist."""
    dim = tl.arange(0, SHAPE.block_dim)[None, :]
    token = (start + row // SHAPE.group).to(tl.int64)
    offset = token * stride + (head * SHAPE.group + row % SHAPE.group) * SHAPE.head_dim
    inside = (row < query_len * SHAPE.group)[:, None] & (dim < SHAPE.head_dim)
    return offset[:, None] + dim, inside


@triton.jit
def attend_rows(
    query, cache, table, start, first_row, query_len, seq_len, head, first_tile, end_tile,
    query_stride, block_stride, scale, ROWS: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """State of rows of one kv head after those tiles from first to end that they see."""
    row = first_row + tl.arange(0, ROWS)
    offset, inside = _rows(start, row, query_len, head, query_stride, SHAPE)
    q = tl.load(query + offset, mask=inside, other=0.0)
    before = seq_len - query_len
    position = before + row // SHAPE.group
    first = before + first_row // SHAPE.group
    last_row = tl.minimum(first_row + ROWS, query_len * SHAPE.group) - 1
    end_key = before + last_row // SHAPE.group + 1
    end_tile = tl.minimum(end_tile, tl.cdiv(end_key, TILE))
    first_key, seen_by_all = 0, (first + 1) // TILE
    if SHAPE.window:
        first_key, seen_by_all = tl.maximum(first - SHAPE.window + 1, 0), 0
        first_tile = tl.maximum(first_tile, first_key // TILE)
    return _walk(
        q, position, first_tile, end_tile, seen_by_all, first_key, end_key, table,
        cache + head.to(tl.int64) * (SHAPE.block_size * SHAPE.head_dim), block_stride, scale,
        ROWS, SHAPE,
    )  # fmt: skip


@triton.jit
def store_rows(out, start, row, query_len, head, total, summed, SHAPE: tl.constexpr):
    """The result of rows; those past the request are left out, and may have seen nothing."""
    stride = SHAPE.num_kv_heads * SHAPE.group * SHAPE.head_dim
    offset, inside = _rows(start, row, query_len, head, stride, SHAPE)
    result = summed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)
