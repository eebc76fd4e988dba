"""The kernel that holds draws to min_p, top_k and top_p, without sorting: one program a row.

As `sample/draw.py`: a winner that is cut takes everything that ranks after it out of the race, and the
rest is drawn again with the same noise. Bounds of blocks are known from the first draw, so a redraw
reads only blocks that may win; a look at what ranks ahead of a winner reads the row.
"""

from __future__ import annotations

from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.sampling import OK
from octavo.kernels.triton.sampling_noise import (
    BLOCK,
    CUT_MASS,
    LOG_MIN_P,
    NO_COLUMN,
    PENDING,
    RANDOM_CUT,
    STATE,
    TABLE_WIDTH,
    TOKEN,
    TOP_K,
    TOP_P,
    finish,
    load_distance,
    open_row,
    search,
    weight,
)

LIST_SIZE = 8192
"""fp32 a row of `lists`: candidates for top_k. More of them than this, and the row itself is read."""


def cut_options(chunk: int, vocab: int) -> dict[str, int]:
    """Compile-time values of the kernel; chunk as in `sampling.launch_options`."""
    num_chunks = -(-vocab // chunk)
    num_blocks = num_chunks * (chunk // int(BLOCK.value))
    return {
        "VOCAB": vocab,
        "NUM_CHUNKS": num_chunks,
        "NUM_BLOCKS": num_blocks,
        "PADDED_BLOCKS": triton.next_power_of_2(num_blocks),
        "TILE": min(8192, triton.next_power_of_2(vocab)),
        "LIST_TILE": min(2048, triton.next_power_of_2(vocab)),
        "LIST_SIZE": LIST_SIZE,
        "num_warps": 16,
        "enable_fp_fusion": False,
    }


@triton.jit
def _magnitude(distance):
    """Non-negative int32 that sorts distances, fp32 <= 0: 0 at the most likely token."""
    return distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load(values, is_list, size, index, row, VOCAB: tl.constexpr):
    """Distances at some indices of a list of `size`, or else of the row; -inf beyond the end."""
    if is_list:
        distance = tl.load(values + index, mask=index < size, other=float("-inf"))
    else:
        distance = load_distance(row, index, VOCAB)
    return distance


@triton.jit
def _ahead(values, is_list, size, row, at, token, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """How many of a list or the row rank ahead of a token with distance `at`; their weight, int64."""
    count = 0
    mass = tl.cast(0, tl.int64)
    for start in range(0, size, TILE):
        index = start + tl.arange(0, TILE)
        distance = _load(values, is_list, size, index, row, VOCAB)
        ahead = (distance > at) | ((distance == at) & (index < token))
        count += tl.sum(ahead.to(tl.int32))
        mass += tl.sum(tl.where(ahead, weight(distance), 0))
    return count, mass


@triton.jit
def _kth(k, values, is_list, size, row, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Magnitude of the k-th most likely of a list or the row, two bits at a time; 1 <= k <= size."""
    found = tl.cast(0, tl.uint32)
    for place in range(16):
        # How many are below each of the three values that the next two bits can start at: counts
        # of 21 bits, a vocabulary has under 2**19 tokens.
        step = tl.cast(1, tl.uint32) << (30 - 2 * place)
        counts = tl.cast(0, tl.int64)
        for start in range(0, size, TILE):
            index = start + tl.arange(0, TILE)
            magnitude = _magnitude(_load(values, is_list, size, index, row, VOCAB)).to(tl.uint32)
            below = (magnitude < found + step).to(tl.int64)
            below += (magnitude < found + step * 2).to(tl.int64) << 21
            below += (magnitude < found + step * 3).to(tl.int64) << 42
            counts += tl.sum(tl.where(index < size, below, 0))
        digit = ((counts & 0x1FFFFF) < k).to(tl.uint32)
        digit += (((counts >> 21) & 0x1FFFFF) < k).to(tl.uint32)
        digit += ((counts >> 42) < k).to(tl.uint32)
        found += digit * step
    return found.to(tl.int32)


@triton.jit
def _mass_of_top(
    top_k, log_min_p, maxima, candidates, row,
    VOCAB: tl.constexpr, NUM_BLOCKS: tl.constexpr, TILE: tl.constexpr, LIST_TILE: tl.constexpr,
    LIST_SIZE: tl.constexpr,
):  # fmt: skip
    """Weight, int64, of what min_p leaves of the top_k most likely tokens.

    maxima: largest distance of each block. top_k tokens are at least as likely as the top_k-th of
    these, so no less likely one is needed: the few that are left go to the list `candidates`.
    """
    limit = 0x7F800000  # masked tokens too
    if top_k <= NUM_BLOCKS:
        limit = _kth(top_k, maxima, True, NUM_BLOCKS, row, VOCAB, LIST_TILE)
    size = 0
    for start in range(0, VOCAB, TILE):
        columns = start + tl.arange(0, TILE)
        distance = load_distance(row, columns, VOCAB)
        keep = (_magnitude(distance) <= limit) & (columns < VOCAB)
        place = size + tl.cumsum(keep.to(tl.int32)) - 1
        tl.store(candidates + place, distance, mask=keep & (place < LIST_SIZE))
        size += tl.sum(keep.to(tl.int32))
    tl.debug_barrier()  # other threads of this program read the list
    is_list = size <= LIST_SIZE
    size = tl.where(is_list, size, VOCAB)
    last = _kth(top_k, candidates, is_list, size, row, VOCAB, LIST_TILE)
    at = -(last.to(tl.float32, bitcast=True))
    # Where min_p leaves less than top_k does, all tokens down to min_p count.
    short = at < log_min_p
    limit_token = tl.where(short, NO_COLUMN, 0)
    limit_distance = tl.maximum(at, log_min_p)
    count, mass = _ahead(
        candidates, is_list, size, row, limit_distance, limit_token, VOCAB, LIST_TILE
    )
    return mass + tl.where(short, 0, (top_k - count) * weight(at))


@triton.jit
def cut(
    logits, stride, work, work_rows, rows, table, scratch, host, history, num_tokens, history_len,
    block_bounds, lists,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, TILE: tl.constexpr, LIST_TILE: tl.constexpr,
    LIST_SIZE: tl.constexpr,
):  # fmt: skip
    """Redraws until the token is not cut, and ends the row. The first draw is in scratch."""
    row = tl.program_id(0)
    state = scratch + row * (STATE + 2 * NUM_CHUNKS)
    if tl.load(state + PENDING) != RANDOM_CUT:
        return
    slot = tl.load(rows + row)
    settings = table + slot * TABLE_WIDTH
    source = open_row(
        logits, stride, work, work_rows, row, settings, state, num_tokens + slot, VOCAB
    )
    log_min_p = tl.load(settings + LOG_MIN_P).to(tl.float32)
    top_k = tl.load(settings + TOP_K).to(tl.int32)
    top_p = tl.load(settings + TOP_P)
    token = tl.load(state + TOKEN).to(tl.int32)
    is_cut = token != source.top
    # The most likely token is never cut, so most sharp rows end here.
    if is_cut:
        block_bounds += row * (2 * NUM_BLOCKS)
        lists += row * LIST_SIZE
        mass = tl.load(state + CUT_MASS)
        if (top_p < 1.0) & (top_k < VOCAB):
            mass = _mass_of_top(
                top_k, log_min_p, block_bounds + NUM_BLOCKS, lists, source,
                VOCAB, NUM_BLOCKS, TILE, LIST_TILE, LIST_SIZE,
            )  # fmt: skip
        goal = tl.where(top_p < 1.0, tl.maximum(top_p * mass.to(tl.float64), 1.0), float("inf"))
        blocks = tl.arange(0, PADDED_BLOCKS)
        while is_cut:
            at = load_distance(source, token, VOCAB)
            is_cut = at < log_min_p
            if (is_cut == 0) & ((top_k < VOCAB) | (goal < float("inf"))):
                count, mass = _ahead(lists, False, VOCAB, source, at, token, VOCAB, TILE)
                is_cut = (count >= top_k) | (mass.to(tl.float64) >= goal)
            if is_cut:
                # Blocks with nothing as likely as this token are out; the search masks the rest.
                inside = blocks < NUM_BLOCKS
                place = block_bounds + NUM_BLOCKS + blocks
                maxima = tl.load(place, mask=inside, other=float("-inf"))
                inside &= maxima >= at
                bounds = tl.load(block_bounds + blocks, mask=inside, other=float("-inf"))
                _score, token = search(source, bounds, blocks, at, token, VOCAB)
                is_cut = token != source.top
    finish(row, slot, token, OK, state, host, history, num_tokens, history_len)
