"""Stateless random numbers: a hash of (seed, position, stream, token id), nothing remembered.

Every number is a pure function of its inputs, so batch mates, retries, chunking, preemption and
speculation cannot change it. All hashing is exact 32-bit arithmetic held in int64: a factor below
2**32 times a constant below 2**31 cannot overflow, so CPU, GPU and plain Python agree bit by bit.
Logarithms are taken in float64 and rounded once, which hides the last-bit differences of libraries.

Noise comes in blocks of BLOCK token ids. The first of 64 unit-rate arrivals comes after Exp(1)/64
and belongs to a uniformly chosen token; the others follow it by independent Exp(1) gaps (the
exponential has no memory). That is exactly 64 independent Exp(1) times, and -log of each is Gumbel
noise, but one hash bounds a whole block: blocks that cannot win are never expanded.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
STREAM_SAMPLE = 0
"""The stream that draws output tokens; other uses of randomness take other numbers."""

_MASK = 0xFFFFFFFF
# Multipliers of a measured low-bias xorshift-multiply mixer (Wellons' hash prospector family),
# the second with its top bit clear so that products stay below 2**63.
_MULTIPLIER_1 = 0x21F0AAAD
_MULTIPLIER_2 = 0x735A2D97
# Fractions of the golden ratio and of sqrt(3): only their being different matters.
_KEY_INIT = (0x9E3779B9, 0xBB67AE85)
# Separates block counters from token ids, which stay below it.
_BLOCK_COUNTER = 1 << 30


def mix(x: Tensor) -> Tensor:
    """Bijective 32-bit mixer on int64 values in [0, 2**32)."""
    x = ((x ^ (x >> 16)) * _MULTIPLIER_1) & _MASK
    x = ((x ^ (x >> 15)) * _MULTIPLIER_2) & _MASK
    return x ^ (x >> 15)


def row_keys(seed_words: Tensor, positions: Tensor, stream: int = STREAM_SAMPLE) -> Tensor:
    """Keys (rows, 2) int64 of the draws at one position each.

    seed_words: (rows, 2) int64, low and high 32 bits of the seed; positions: (rows,) int64 >= 0,
    the absolute position of the token to sample.
    """
    halves = []
    for init in _KEY_INIT:
        half = mix(seed_words[:, 0] ^ init)
        half = mix(half ^ seed_words[:, 1])
        half = mix(half ^ (positions & _MASK))
        halves.append(mix(half ^ stream))
    return torch.stack(halves, dim=1)


def random_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """32 random bits as int64, shape of keys[..., 0] broadcast with counters ([0, 2**32) int64)."""
    return mix(mix(counters ^ keys[..., 0]) ^ keys[..., 1])


def block_arrivals(keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """First arrival time of each block and the token it belongs to.

    keys: (..., 2) int64; blocks: int64 block numbers that broadcast with keys[..., 0]. Returns
    times float64 > 0 (26 bits of resolution) and offsets int64 in [0, BLOCK).
    """
    bits = random_bits(keys, blocks | _BLOCK_COUNTER)
    uniform = ((bits >> 6).double() + 0.5) * 2.0**-26
    return uniform.log().neg_().div_(BLOCK), bits & (BLOCK - 1)


def block_bounds(keys: Tensor, blocks: Tensor) -> Tensor:
    """Largest noise within each block, fp32: what its first arrival's token gets."""
    return block_arrivals(keys, blocks)[0].log_().neg_().float()


def gumbel_noise(keys: Tensor, blocks: Tensor) -> Tensor:
    """Gumbel noise of all tokens of some blocks.

    keys: (n, 2) int64; blocks: (n,) int64. Returns (n, BLOCK) fp32: entry [i, j] is the noise of
    token blocks[i] * BLOCK + j under keys[i], the same whichever other blocks are asked for.
    """
    times, offsets = block_arrivals(keys, blocks)
    lanes = torch.arange(BLOCK, device=keys.device)
    bits = random_bits(keys[:, None], blocks[:, None] * BLOCK + lanes)
    gaps = ((bits.double() + 0.5) * 2.0**-32).log_().neg_()
    gaps.masked_fill_(lanes == offsets[:, None], 0.0)
    return gaps.add_(times[:, None]).log_().neg_().float()
