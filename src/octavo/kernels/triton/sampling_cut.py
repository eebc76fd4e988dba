"""The kernel that holds draws to min_p, top_k and top_p, without sorting: one program a row.

As `sample/draw.py`: a winner that is cut takes everything that ranks after it out of the race, and the
rest is drawn again with the same noise. Bounds of blocks are known from the first draw, so a redraw
reads only blocks that may win; a look at what ranks ahead of a winner reads the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.sampling import CUT_MASS, FINAL_KEY, OK, PLANES
from octavo.kernels.triton.sampling_noise import (
    BLOCK,
    FEATURES,
    LOG_MIN_P,
    RANDOM_CUT,
    TABLE_WIDTH,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    finish,
    load_distance,
    row_keys,
    search,
    unpack,
    weight,
)

LIST_SIZE = 8192
"""fp32 a row of `lists`: candidates for top_k. More of them than this, and the row itself is read."""


def cut_options(chunk: int, vocab: int) -> dict[str, int | bool]:
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


def scratch(
    max_num_seqs: int, chunk: int, vocab: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What launches share besides sampling.scratch: block bounds and lists of candidates, fp32."""
    blocks = int(cut_options(chunk, vocab)["NUM_BLOCKS"])
    return (
        torch.empty(max_num_seqs, 2, blocks, dtype=torch.float32, device=device),
        torch.empty(max_num_seqs, LIST_SIZE, dtype=torch.float32, device=device),
    )


@triton.jit
def _magnitude(distance):
    """Non-negative int32 that sorts distances, fp32 <= 0: 0 at the most likely token."""
    return distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load(
    values,
    is_list,
    size,
    index,
    logits,
    stride,
    work,
    work_row,
    row,
    row_max,
    temperature,
    VOCAB: tl.constexpr,
):
    """Distances at some indices of a list of `size`, or else of the row; -inf beyond the end."""
    if is_list:
        distance = tl.load(values + index, mask=index < size, other=float("-inf"))
    else:
        distance = load_distance(
            logits, stride, work, work_row, row, index, row_max, temperature, VOCAB
        )
    return distance


@triton.jit
def _kth(
    k,
    values,
    is_list,
    size,
    logits,
    stride,
    work,
    work_row,
    row,
    row_max,
    temperature,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Magnitude of the k-th most likely of a list or the row, two bits at a time; 1 <= k <= size."""
    found = tl.cast(0, tl.uint32)
    shift = 30
    while shift >= 0:
        # How many are below each of the three values that the next two bits can start at: counts
        # of 21 bits, a vocabulary has under 2**19 tokens.
        step = tl.cast(1, tl.uint32) << shift
        counts = tl.cast(0, tl.int64)
        start = 0
        while start < size:
            index = start + tl.arange(0, TILE)
            distance = _load(
                values, is_list, size, index, logits, stride, work, work_row, row, row_max,
                temperature, VOCAB,
            )  # fmt: skip
            magnitude = _magnitude(distance).to(tl.uint32)
            below = (magnitude < found + step).to(tl.int64)
            below += (magnitude < found + step * 2).to(tl.int64) << 21
            below += (magnitude < found + step * 3).to(tl.int64) << 42
            counts += tl.sum(tl.where(index < size, below, 0))
            start += TILE
        digit = ((counts & 0x1FFFFF) < k).to(tl.uint32)
        digit += (((counts >> 21) & 0x1FFFFF) < k).to(tl.uint32)
        digit += ((counts >> 42) < k).to(tl.uint32)
        found += digit * step
        shift -= 2
    return found.to(tl.int32)


@triton.jit
def _collect(
    limit,
    candidates,
    logits,
    stride,
    work,
    work_row,
    row,
    row_max,
    temperature,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    LIST_SIZE: tl.constexpr,
):
    """Lists the row's distances of at most this magnitude; returns how many there are."""
    count = 0
    for start in range(0, VOCAB, TILE):
        columns = start + tl.arange(0, TILE)
        distance = load_distance(
            logits, stride, work, work_row, row, columns, row_max, temperature, VOCAB
        )
        keep = (_magnitude(distance) <= limit) & (columns < VOCAB)
        place = count + tl.cumsum(keep.to(tl.int32)) - 1
        tl.store(candidates + place, distance, mask=keep & (place < LIST_SIZE))
        count += tl.sum(keep.to(tl.int32))
    tl.debug_barrier()  # other threads of this program read the list
    return count


@triton.jit
def _mass_of_top(
    top_k,
    log_min_p,
    maxima,
    candidates,
    logits,
    stride,
    work,
    work_row,
    row,
    row_max,
    temperature,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    LIST_TILE: tl.constexpr,
    LIST_SIZE: tl.constexpr,
):
    """Weight, int64, of what min_p leaves of the top_k most likely tokens.

    maxima: largest distance of each block. top_k tokens are at least as likely as the top_k-th of
    these, so no less likely one is needed: the few that are left go to the list `candidates`.
    """
    limit = 0x7F800000  # masked tokens too
    if top_k <= NUM_BLOCKS:
        limit = _kth(
            top_k, maxima, True, NUM_BLOCKS, logits, stride, work, work_row, row, row_max,
            temperature, VOCAB, LIST_TILE,
        )  # fmt: skip
    size = _collect(
        limit, candidates, logits, stride, work, work_row, row, row_max, temperature,
        VOCAB, TILE, LIST_SIZE,
    )  # fmt: skip
    is_list = size <= LIST_SIZE
    size = tl.where(is_list, size, VOCAB)
    last = _kth(
        top_k, candidates, is_list, size, logits, stride, work, work_row, row, row_max,
        temperature, VOCAB, LIST_TILE,
    )  # fmt: skip
    num_above = 0
    mass = tl.cast(0, tl.int64)
    start = 0
    while start < size:
        index = start + tl.arange(0, LIST_TILE)
        distance = _load(
            candidates, is_list, size, index, logits, stride, work, work_row, row, row_max,
            temperature, VOCAB,
        )  # fmt: skip
        above = _magnitude(distance) < last
        num_above += tl.sum(above.to(tl.int32))
        mass += tl.sum(tl.where(above & (distance >= log_min_p), weight(distance), 0))
        start += LIST_TILE
    at = -(last.to(tl.float32, bitcast=True))
    return mass + tl.where(at >= log_min_p, (top_k - num_above) * weight(at), 0)


@triton.jit
def _is_cut(
    token,
    at,
    log_min_p,
    top_k,
    goal,
    logits,
    stride,
    work,
    work_row,
    row,
    row_max,
    temperature,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Whether a token with distance `at` is cut by min_p, top_k or the mass that top_p wants."""
    cut = at < log_min_p
    if (cut == 0) & ((top_k < VOCAB) | (goal < float("inf"))):
        num_ahead = 0
        mass = tl.cast(0, tl.int64)
        for start in range(0, VOCAB, TILE):
            columns = start + tl.arange(0, TILE)
            distance = load_distance(
                logits, stride, work, work_row, row, columns, row_max, temperature, VOCAB
            )
            ahead = (distance > at) | ((distance == at) & (columns < token))
            num_ahead += tl.sum(ahead.to(tl.int32))
            mass += tl.sum(tl.where(ahead, weight(distance), 0))
        cut = (num_ahead >= top_k) | (mass.to(tl.float64) >= goal)
    return cut


@triton.jit
def cut(
    logits, stride, work, work_rows, rows, table, scratch, block_bounds, lists, results, host,
    token_ids, history, num_tokens,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, TILE: tl.constexpr, LIST_TILE: tl.constexpr,
    LIST_SIZE: tl.constexpr, HISTORY_LEN: tl.constexpr, WRITE_BACK: tl.constexpr,
):  # fmt: skip
    """Redraws until the token is not cut, and ends the row. The first draw is in token_ids."""
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    settings = table + slot * TABLE_WIDTH
    if (tl.load(settings + FEATURES).to(tl.int32) & RANDOM_CUT) == 0:
        return
    if tl.load(results + row * 2 + 1) != OK:
        return
    state = scratch + row * (PLANES + 3 * NUM_CHUNKS)
    row_max, top = unpack(tl.load(state + FINAL_KEY))
    temperature = tl.load(settings + TEMPERATURE).to(tl.float32)
    first, second = row_keys(settings, tl.load(num_tokens + slot))
    work_row = tl.load(work_rows + row)
    log_min_p = tl.load(settings + LOG_MIN_P).to(tl.float32)
    top_k = tl.load(settings + TOP_K).to(tl.int32)
    top_p = tl.load(settings + TOP_P)
    token = tl.load(token_ids + row)
    # The most likely token is never cut, so most sharp rows end here.
    if token != top:
        block_bounds += row * (2 * NUM_BLOCKS)
        mass = tl.load(state + CUT_MASS)
        if (top_p < 1.0) & (top_k < VOCAB):
            mass = _mass_of_top(
                top_k, log_min_p, block_bounds + NUM_BLOCKS, lists + row * LIST_SIZE,
                logits, stride, work, work_row, row, row_max, temperature,
                VOCAB, NUM_BLOCKS, TILE, LIST_TILE, LIST_SIZE,
            )  # fmt: skip
        goal = tl.where(top_p < 1.0, tl.maximum(top_p * mass.to(tl.float64), 1.0), float("inf"))
        blocks = tl.arange(0, PADDED_BLOCKS)
        is_cut = token != top
        while is_cut:
            at = load_distance(
                logits, stride, work, work_row, row, token, row_max, temperature, VOCAB
            )
            is_cut = _is_cut(
                token, at, log_min_p, top_k, goal, logits, stride, work, work_row, row, row_max,
                temperature, VOCAB, TILE,
            )  # fmt: skip
            if is_cut:
                # Blocks with nothing as likely as this token are out; the search masks the rest.
                inside = blocks < NUM_BLOCKS
                place = block_bounds + NUM_BLOCKS + blocks
                maxima = tl.load(place, mask=inside, other=float("-inf"))
                inside &= maxima >= at
                bounds = tl.load(block_bounds + blocks, mask=inside, other=float("-inf"))
                _score, token = search(
                    logits, stride, work, work_row, row, row_max, temperature, first, second,
                    bounds, blocks, top, at, token, VOCAB,
                )  # fmt: skip
                is_cut = token != top
    finish(
        row, slot, token, OK, results, host, token_ids, history, num_tokens, HISTORY_LEN, WRITE_BACK
    )  # fmt: skip
