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

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)
"""A value in [0, 2**32), or an int64 tensor of them."""

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


def mix(x: Word) -> Word:
    """Bijective 32-bit mixer."""
    x = ((x ^ (x >> 16)) * _MULTIPLIER_1) & _MASK
    x = ((x ^ (x >> 15)) * _MULTIPLIER_2) & _MASK
    return x ^ (x >> 15)


def request_key(seed: int, stream: int = STREAM_SAMPLE) -> tuple[int, int]:
    """Two 32-bit words for a request's draws on one stream. Of the seed, 64 bits count."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    first, second = (mix(mix(mix(init ^ low) ^ high) ^ stream) for init in _KEY_INIT)
    return first, second


def row_keys(request_keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (rows, 2) int64 of the draws at one position each.

    request_keys: (rows, 2) int64; positions: (rows,) int64 in [0, 2**32), the absolute position of
    the token to sample.
    """
    return mix(request_keys ^ positions[:, None])


def random_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """32 random bits as int64, shape of keys[..., 0] broadcast with counters ([0, 2**32) int64)."""
    return mix(mix(counters ^ keys[..., 0]) ^ keys[..., 1])


def block_arrivals(keys: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """First arrival time of each block of a row, and the token within the block it belongs to.

    keys: (rows, 2) int64. Returns times (rows, num_blocks) float64 > 0, from 26 random bits, and
    offsets (rows, num_blocks) int64 in [0, BLOCK), from the other 6.
    """
    counters = torch.arange(_BLOCK_COUNTER, _BLOCK_COUNTER + num_blocks, device=keys.device)
    bits = random_bits(keys[:, None], counters)
    uniform = (bits >> 6).double().add_(0.5).mul_(2.0**-26)
    return uniform.log_().mul_(-1 / BLOCK), bits & (BLOCK - 1)


def gumbel_noise(keys: Tensor, blocks: Tensor, times: Tensor, offsets: Tensor) -> Tensor:
    """Gumbel noise (n, BLOCK) fp32 of the tokens of some blocks; none exceeds -log(times).

    keys: (n, 2) int64; blocks: (n,) int64 block numbers; times, offsets: (n,), their arrivals.
    """
    lanes = torch.arange(BLOCK, device=keys.device)
    bits = random_bits(keys[:, None], blocks[:, None] * BLOCK + lanes)
    gaps = bits.double().add_(0.5).mul_(2.0**-32).log_().neg_()
    gaps.masked_fill_(lanes == offsets[:, None], 0.0)
    return negative_log(gaps.add_(times[:, None]))


def negative_log(times: Tensor) -> Tensor:
    """-log of float64 times, rounded to fp32."""
    return times.log().neg_().float()
