"""Sampling kernels over (chunks of the vocabulary, rows): greedy tokens, Gumbel draws, scores.

A row's programs store int64 parts: ordered keys, of which the largest counts, or sums of integers.
The last of them to arrive reduces the parts and finishes the row, so neither the grid nor the number
of rows can show in any bit. `scan` comes first; rows without randomness end there, `draw` ends those
without cuts, `sampling_cut` the others; `score` then looks at the raw logits again.

A row of `scratch` (max_num_seqs, ROW + 3 * chunks) int64, zeros at first, is: the largest raw and
processed logit as keys, the mass under top_p, the ticket, and three planes of parts. A row of
`results` (rows, 2) int32 is: token, error code; of `host` (rows, 4) int32, which kernels only write:
the same, rank, bits of the fp32 logprob.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.sampling_noise import (
    BLOCK,
    FEATURES,
    LOG_MIN_P,
    LOGPROBS,
    LOWEST,
    RANDOM,
    RANDOM_CUT,
    TABLE_WIDTH,
    TEMPERATURE,
    TOP_P,
    WEIGHT_ONE,
    arrivals,
    best_of,
    finish,
    is_last,
    load_distance,
    load_logits,
    load_parts,
    negative_log,
    pack,
    row_keys,
    search,
    unpack,
    weight,
)

ROW = 4
"""Numbers of a row of scratch before its planes."""
RAW_KEY = tl.constexpr(0)
FINAL_KEY = tl.constexpr(1)
CUT_MASS = tl.constexpr(2)
TICKET = tl.constexpr(3)
PLANES = tl.constexpr(ROW)

OK = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)
ALL_MASKED = tl.constexpr(2)
OUT_OF_RANGE = tl.constexpr(3)


def launch_options(chunk: int, vocab: int) -> dict[str, int | bool]:
    """Compile-time values that all kernels of this file share. chunk: a power of two >= BLOCK."""
    num_chunks = -(-vocab // chunk)
    return {
        "VOCAB": vocab,
        "CHUNK": chunk,
        "NUM_CHUNKS": num_chunks,
        "PADDED": triton.next_power_of_2(num_chunks),
        "num_warps": 4,
        # Contracted multiply-adds would differ from torch's, and between variants of a kernel.
        "enable_fp_fusion": False,
    }


def scratch(max_num_seqs: int, chunk: int, vocab: int, device: torch.device) -> Tensor:
    """What launches of these kernels share, one after the other on a stream."""
    width = ROW + 3 * -(-vocab // chunk)
    return torch.zeros(max_num_seqs, width, dtype=torch.int64, device=device)


@triton.jit
def scan(
    logits, stride, work, work_rows, rows, table, scratch, results, host, token_ids, history,
    num_tokens,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    HISTORY_LEN: tl.constexpr, WRITE_BACK: tl.constexpr,
):  # fmt: skip
    """Row maxima and errors; ends greedy and failed rows."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    state = scratch + row * (PLANES + 3 * NUM_CHUNKS)
    parts = state + PLANES
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    raw = load_logits(logits, stride, work, -1, row, columns, VOCAB)
    # Maxima ignore NaN; +inf is as much of an error.
    tl.store(parts + chunk, best_of(tl.where(raw != raw, float("inf"), raw), columns))
    work_row = tl.load(work_rows + row)
    if work_row >= 0:
        x = load_logits(logits, stride, work, work_row, row, columns, VOCAB)
        x = tl.where(x != x, float("inf"), x)
        tl.store(parts + NUM_CHUNKS + chunk, best_of(x, columns))
    if is_last(state + TICKET, NUM_CHUNKS):
        lowest = -(2**63)
        raw_key = tl.max(load_parts(parts, lowest, NUM_CHUNKS, PADDED))
        final_key = raw_key
        if work_row >= 0:
            final_key = tl.max(load_parts(parts + NUM_CHUNKS, lowest, NUM_CHUNKS, PADDED))
        tl.store(state + RAW_KEY, raw_key)
        tl.store(state + FINAL_KEY, final_key)
        raw_max, _column = unpack(raw_key)
        final_max, token = unpack(final_key)
        code = tl.where(final_max == float("inf"), OUT_OF_RANGE, OK)
        code = tl.where(final_max == float("-inf"), ALL_MASKED, code)
        code = tl.where(raw_max == float("inf"), NOT_FINITE, code)
        slot = tl.load(rows + row)
        features = tl.load(table + slot * TABLE_WIDTH + FEATURES).to(tl.int32)
        if (code != OK) | ((features & (RANDOM | RANDOM_CUT)) == 0):
            finish(
                row, slot, token, code, results, host, token_ids, history, num_tokens,
                HISTORY_LEN, WRITE_BACK,
            )  # fmt: skip
        else:
            tl.store(results + row * 2 + 1, code)


@triton.jit
def draw(
    logits, stride, work, work_rows, rows, table, scratch, block_bounds, results, host, token_ids,
    history, num_tokens,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    HISTORY_LEN: tl.constexpr, WRITE_BACK: tl.constexpr,
):  # fmt: skip
    """Gumbel arg-max of random rows over the whole vocabulary; ends those without cuts.

    Rows with cuts leave their blocks' bounds and largest distances in block_bounds, (max_num_seqs,
    2, NUM_CHUNKS * CHUNK / BLOCK) fp32, and the weight that min_p leaves in scratch.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + row)
    settings = table + slot * TABLE_WIDTH
    features = tl.load(settings + FEATURES).to(tl.int32)
    if (features & (RANDOM | RANDOM_CUT)) == 0:
        return
    if tl.load(results + row * 2 + 1) != OK:
        return
    state = scratch + row * (PLANES + 3 * NUM_CHUNKS)
    row_max, top = unpack(tl.load(state + FINAL_KEY))
    temperature = tl.load(settings + TEMPERATURE).to(tl.float32)
    first, second = row_keys(settings, tl.load(num_tokens + slot))
    work_row = tl.load(work_rows + row)
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    blocks = chunk * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    distance = load_distance(
        logits, stride, work, work_row, row, columns, row_max, temperature, VOCAB
    )
    maxima = tl.max(distance, axis=1)
    times, _lanes = arrivals(first, second, blocks)
    bounds = maxima + negative_log(times)
    score, token = search(
        logits, stride, work, work_row, row, row_max, temperature, first, second,
        bounds, blocks, top, float("-inf"), VOCAB, VOCAB,
    )  # fmt: skip
    parts = state + PLANES
    tl.store(parts + chunk, pack(score, token))
    is_cut = (features & RANDOM_CUT) != 0
    if is_cut:
        NUM_BLOCKS: tl.constexpr = NUM_CHUNKS * BLOCKS
        place = block_bounds + row * (2 * NUM_BLOCKS) + blocks
        tl.store(place, bounds)
        tl.store(place + NUM_BLOCKS, maxima)
        if tl.load(settings + TOP_P) < 1.0:
            log_min_p = tl.load(settings + LOG_MIN_P).to(tl.float32)
            likely = tl.where(distance >= log_min_p, weight(distance), 0)
            tl.store(parts + NUM_CHUNKS + chunk, tl.sum(likely))
    if is_last(state + TICKET, NUM_CHUNKS):
        score, token = unpack(tl.max(load_parts(parts, -(2**63), NUM_CHUNKS, PADDED)))
        if is_cut:
            tl.store(token_ids + row, token)
            mass = tl.sum(load_parts(parts + NUM_CHUNKS, 0, NUM_CHUNKS, PADDED))
            tl.store(state + CUT_MASS, mass)
        else:
            finish(
                row, slot, token, OK, results, host, token_ids, history, num_tokens,
                HISTORY_LEN, WRITE_BACK,
            )  # fmt: skip


@triton.jit
def score(
    logits, stride, rows, table, scratch, results, host, norms,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Logprob and rank of the tokens of rows that ask, from raw logits.

    norms: (rows, 2) fp32, filled for the same rows: maximum and log of the mass.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + row)
    features = tl.load(table + slot * TABLE_WIDTH + FEATURES).to(tl.int32)
    if (features & LOGPROBS) == 0:
        return
    if tl.load(results + row * 2 + 1) != OK:
        return
    state = scratch + row * (PLANES + 3 * NUM_CHUNKS)
    raw_max, _column = unpack(tl.load(state + RAW_KEY))
    token = tl.load(results + row * 2)
    chosen = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    raw = load_logits(logits, stride, logits, -1, row, columns, VOCAB)
    parts = state + PLANES
    tl.store(parts + chunk, tl.sum(weight(raw - raw_max)))
    # The lowest finite value stands for -inf, as in the score itself.
    above = raw > tl.maximum(chosen, LOWEST)
    tl.store(parts + NUM_CHUNKS + chunk, tl.sum(above.to(tl.int32)).to(tl.int64))
    if is_last(state + TICKET, NUM_CHUNKS):
        mass = tl.sum(load_parts(parts, 0, NUM_CHUNKS, PADDED))
        rank = tl.sum(load_parts(parts + NUM_CHUNKS, 0, NUM_CHUNKS, PADDED)) + 1
        log_mass = tl.log(mass.to(tl.float64) * (1.0 / WEIGHT_ONE)).to(tl.float32)
        score = tl.maximum((chosen - raw_max) - log_mass, LOWEST)
        tl.store(host + row * 4 + 2, rank.to(tl.int32))
        tl.store(host + row * 4 + 3, score.to(tl.int32, bitcast=True))
        tl.store(norms + row * 2, raw_max)
        tl.store(norms + row * 2 + 1, log_mass)
