"""Sampling kernels over (chunks of the vocabulary, rows): greedy tokens, Gumbel draws, scores.

A row's programs store int64 parts: ordered keys, of which the largest counts, or sums of integers.
The last of them to arrive reduces the parts and finishes the row, so neither the grid nor the number
of rows can show in any bit. `scan` comes first; rows without randomness end there, `draw` ends those
without cuts, `sampling_cut` the others; `score` then looks at the raw logits again.

A row of `scratch` (max_num_seqs, STATE + 2 * chunks) int64, zeros at first, is: the largest raw and
processed logit as keys, the mass under top_p, the ticket, RANDOM or RANDOM_CUT while a token is owed,
the token (-1 for a row that failed), and two planes of parts. A row of `host` (rows, 4) int32, which
kernels only write, is: token, error code, rank, bits of the fp32 logprob. A token is appended to its
slot's row of `history` (max_num_seqs, history_len), unless history_len is said to be 0.
"""

from __future__ import annotations

from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.sampling_noise import (
    BLOCK,
    CUT_MASS,
    FEATURES,
    FINAL_KEY,
    LOG_MIN_P,
    LOGPROBS,
    LOWEST,
    PENDING,
    RANDOM,
    RANDOM_CUT,
    RAW_KEY,
    STATE,
    TABLE_WIDTH,
    TICKET,
    TOKEN,
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
    open_row,
    pack,
    search,
    unpack,
    weight,
)

OK = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)
ALL_MASKED = tl.constexpr(2)
OUT_OF_RANGE = tl.constexpr(3)


def launch_options(chunk: int, vocab: int) -> dict[str, int]:
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


@triton.jit
def scan(
    logits, stride, work, work_rows, rows, table, scratch, host, history, num_tokens, history_len,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Row maxima and errors; ends greedy and failed rows."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    state = scratch + row * (STATE + 2 * NUM_CHUNKS)
    parts = state + STATE
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    raw = load_logits(logits + row.to(tl.int64) * stride, columns, VOCAB)
    # Maxima ignore NaN; +inf is as much of an error.
    tl.store(parts + chunk, best_of(tl.where(raw != raw, float("inf"), raw), columns))
    work_row = tl.load(work_rows + row)
    if work_row >= 0:
        x = load_logits(work + work_row.to(tl.int64) * VOCAB, columns, VOCAB)
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
        pending = tl.where(code == OK, features & (RANDOM | RANDOM_CUT), 0)
        tl.store(state + PENDING, pending)
        if pending == 0:
            finish(row, slot, token, code, state, host, history, num_tokens, history_len)


@triton.jit
def draw(
    logits, stride, work, work_rows, rows, table, scratch, host, history, num_tokens, history_len,
    block_bounds,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Gumbel arg-max of random rows over the whole vocabulary; ends those without cuts.

    Rows with cuts leave their blocks' bounds and largest distances in block_bounds, (max_num_seqs,
    2, NUM_CHUNKS * CHUNK / BLOCK) fp32, and in scratch the token and the weight that min_p leaves.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    state = scratch + row * (STATE + 2 * NUM_CHUNKS)
    pending = tl.load(state + PENDING)
    if pending == 0:
        return
    slot = tl.load(rows + row)
    settings = table + slot * TABLE_WIDTH
    source = open_row(
        logits, stride, work, work_rows, row, settings, state, num_tokens + slot, VOCAB
    )
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    blocks = chunk * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    distance = load_distance(source, columns, VOCAB)
    maxima = tl.max(distance, axis=1)
    times, _lanes = arrivals(source.first, source.second, blocks)
    bounds = maxima + negative_log(times)
    score, token = search(source, bounds, blocks, float("-inf"), VOCAB, VOCAB)
    parts = state + STATE
    tl.store(parts + chunk, pack(score, token))
    if pending == RANDOM_CUT:
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
        if pending == RANDOM_CUT:
            tl.store(state + TOKEN, token)
            mass = tl.sum(load_parts(parts + NUM_CHUNKS, 0, NUM_CHUNKS, PADDED))
            tl.store(state + CUT_MASS, mass)
        else:
            finish(row, slot, token, OK, state, host, history, num_tokens, history_len)


@triton.jit
def score(
    logits, stride, rows, table, scratch, host, norms,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Logprob and rank of the tokens of rows that ask, from raw logits.

    norms: (rows, 2) fp32, filled for the same rows: maximum and log of the mass.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    state = scratch + row * (STATE + 2 * NUM_CHUNKS)
    features = tl.load(table + tl.load(rows + row) * TABLE_WIDTH + FEATURES).to(tl.int32)
    token = tl.load(state + TOKEN)
    if ((features & LOGPROBS) == 0) | (token < 0):
        return
    raw_max, _column = unpack(tl.load(state + RAW_KEY))
    logits += row.to(tl.int64) * stride
    chosen = tl.load(logits + token).to(tl.float32)
    raw = load_logits(logits, chunk * CHUNK + tl.arange(0, CHUNK), VOCAB)
    parts = state + STATE
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
