"""Device functions that the sampling kernels share: noise, weights, ordered keys, reading a row.

The noise is that of `sample/random.py`, bit for bit: the hash in uint32 wraps where the int64 one is
masked, and logarithms are taken in float64 and rounded once. A weight is exp(distance) in whole units
of 2**-44, so sums over a vocabulary are integers and no order of summation can show.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.kernels.triton.lang import tl, triton

BLOCK = tl.constexpr(64)
"""Tokens that share a first arrival."""
MULTIPLIER_1 = tl.constexpr(0x21F0AAAD)
MULTIPLIER_2 = tl.constexpr(0x735A2D97)
BLOCK_COUNTER = tl.constexpr(1 << 30)

WEIGHT_ONE = tl.constexpr(2.0**44)
LOWEST = tl.constexpr(-3.4028234663852886e38)
NO_COLUMN = tl.constexpr(0x7FFFFFFF)

# Columns of the settings table, one row a request slot: `sample.state.Column`.
TEMPERATURE = tl.constexpr(0)
LOG_MIN_P = tl.constexpr(1)
TOP_K = tl.constexpr(2)
TOP_P = tl.constexpr(3)
REPETITION = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
FREQUENCY = tl.constexpr(6)
KEY_FIRST = tl.constexpr(8)
KEY_SECOND = tl.constexpr(9)
FEATURES = tl.constexpr(10)
TABLE_WIDTH = tl.constexpr(11)
# Bits of its FEATURES column: `sample.state.Feature`.
RANDOM = tl.constexpr(1)
RANDOM_CUT = tl.constexpr(2)
LOGPROBS = tl.constexpr(256)

# Numbers of a row of scratch before its parts.
RAW_KEY = tl.constexpr(0)
FINAL_KEY = tl.constexpr(1)
CUT_MASS = tl.constexpr(2)
TICKET = tl.constexpr(3)
PENDING = tl.constexpr(4)
TOKEN = tl.constexpr(5)
STATE = tl.constexpr(6)


class Row(NamedTuple):
    """A row to draw from: where its logits are, what makes distances of them, keys of its noise."""

    logits: Any
    work: Any
    """What processors made of the row, fp32."""
    work_row: Any
    """Negative if none changed it."""
    maximum: Any
    top: Any
    """The most likely token."""
    temperature: Any
    first: Any
    second: Any


@triton.jit
def mix(x):
    """Bijective mixer of uint32."""
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    x = (x ^ (x >> 15)) * MULTIPLIER_2
    return x ^ (x >> 15)


@triton.jit
def random_bits(first, second, counters):
    """32 random bits as uint32. first, second: the row's keys; counters: int32 >= 0."""
    return mix(mix(counters.to(tl.uint32) ^ first) ^ second)


@triton.jit
def arrivals(first, second, blocks):
    """First arrival of each block, float64, and the lane of the block that it belongs to, int32."""
    bits = random_bits(first, second, blocks + BLOCK_COUNTER)
    uniform = ((bits >> 6).to(tl.float64) + 0.5) * (2.0**-26)
    return tl.log(uniform) * (-1.0 / BLOCK), (bits & (BLOCK - 1)).to(tl.int32)


@triton.jit
def negative_log(times):
    """-log of float64 times, rounded to fp32."""
    return (-tl.log(times)).to(tl.float32)


@triton.jit
def gumbel_noise(first, second, tokens):
    """Gumbel noise, fp32, of token ids, int32."""
    times, offsets = arrivals(first, second, tokens // BLOCK)
    uniform = (random_bits(first, second, tokens).to(tl.float64) + 0.5) * (2.0**-32)
    gaps = tl.where(tokens % BLOCK == offsets, 0.0, -tl.log(uniform))
    return negative_log(gaps + times)


@triton.jit
def weight(distance):
    """exp(distance) in whole units of 2**-44, int64. distance: fp32 <= 0."""
    return (tl.exp(tl.maximum(distance, -40.0)) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def pack(value, column):
    """An int64 key that is largest for the largest fp32 value and then the lowest column, int32."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes the two zeros equal
    bits = tl.where(bits < 0, bits ^ NO_COLUMN, bits)
    return (bits.to(tl.int64) << 32) + (column ^ NO_COLUMN).to(tl.int64)


@triton.jit
def unpack(key):
    """Value and column of a key."""
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ NO_COLUMN, bits)
    column = (key & NO_COLUMN).to(tl.int32) ^ NO_COLUMN
    return bits.to(tl.float32, bitcast=True), column


@triton.jit
def best_of(values, columns):
    """The key of the largest of some values, the lowest column on ties."""
    high = tl.max(values)
    return pack(high, tl.min(tl.where(values == high, columns, NO_COLUMN)))


@triton.jit
def load_logits(row, columns, VOCAB: tl.constexpr):
    """fp32 logits of some columns, -inf beyond the vocabulary. row: where they begin."""
    return tl.load(row + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def open_row(
    logits, stride, work, work_rows, row, settings, state, num_tokens, VOCAB: tl.constexpr
):
    """The Row of one that `scan` has seen. settings: its slot's in the table; num_tokens: likewise."""
    work_row = tl.load(work_rows + row)
    maximum, top = unpack(tl.load(state + FINAL_KEY))
    position = tl.load(num_tokens).to(tl.uint32)
    return Row(
        logits=logits + row.to(tl.int64) * stride,
        work=work + work_row.to(tl.int64) * VOCAB,
        work_row=work_row,
        maximum=maximum,
        top=top,
        temperature=tl.load(settings + TEMPERATURE).to(tl.float32),
        first=mix(tl.load(settings + KEY_FIRST).to(tl.uint32) ^ position),
        second=mix(tl.load(settings + KEY_SECOND).to(tl.uint32) ^ position),
    )


@triton.jit
def load_distance(row, columns, VOCAB: tl.constexpr):
    """(logit - row max) / temperature, fp32: 0 at the most likely token, -inf where masked."""
    if row.work_row < 0:
        values = load_logits(row.logits, columns, VOCAB)
    else:
        values = load_logits(row.work, columns, VOCAB)
    return tl.div_rn(values - row.maximum, row.temperature)


@triton.jit
def is_last(ticket, NUM_PROGRAMS: tl.constexpr):
    """Whether all other programs of a row have stored their parts; the ticket is then 0 again."""
    tl.debug_barrier()  # the atomic is one thread's: all stores of this program come before it
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == NUM_PROGRAMS - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def load_parts(parts, other, NUM_PROGRAMS: tl.constexpr, PADDED: tl.constexpr):
    """What the programs of a row stored, (PADDED,) int64. Not from L1, which may be out of date."""
    index = tl.arange(0, PADDED)
    return tl.load(parts + index, mask=index < NUM_PROGRAMS, other=other, cache_modifier=".cg")


@triton.jit
def finish(row, slot, token, code, state, host, history, num_tokens, history_len):
    """Gives out the row's token (0 if it failed) and appends it to the request's history.

    The only writer of num_tokens: no other program of the row may still have to read it.
    """
    tl.store(state + TOKEN, tl.where(code == 0, token, -1))
    token = tl.where(code == 0, token, 0)
    tl.store(host + row * 4, token)
    tl.store(host + row * 4 + 1, code)
    position = tl.load(num_tokens + slot)
    # No request's history is full; if it were, its neighbour's must not be overwritten.
    inside = position < history_len
    tl.store(history + slot.to(tl.int64) * history_len + position, token, mask=inside)
    tl.store(num_tokens + slot, position + 1, mask=inside)


@triton.jit
def search(row, bounds, blocks, limit_distance, limit_token, VOCAB: tl.constexpr):
    """Gumbel arg-max over the blocks given, among tokens that rank ahead of the limit.

    bounds: (n,) fp32, no score in the block exceeds its own; blocks: (n,) int32. The score of the
    row's most likely token is what others must beat. Returns score and token, the lowest id on ties.
    """
    best = gumbel_noise(row.first, row.second, row.top)
    token = row.top
    bound = tl.max(bounds)
    while bound >= best:
        block = tl.min(tl.where(bounds == bound, blocks, NO_COLUMN))
        columns = block * BLOCK + tl.arange(0, BLOCK)
        distance = load_distance(row, columns, VOCAB)
        ahead = (distance > limit_distance) | (
            (distance == limit_distance) & (columns < limit_token)
        )
        noise = gumbel_noise(row.first, row.second, columns)
        scores = tl.where(ahead, distance, float("-inf")) + noise
        high = tl.max(scores)
        winner = tl.min(tl.where(scores == high, columns, NO_COLUMN))
        token = tl.where((high > best) | ((high == best) & (winner < token)), winner, token)
        best = tl.maximum(best, high)
        bounds = tl.where(blocks == block, float("-inf"), bounds)
        bound = tl.max(bounds)
    return best, token
