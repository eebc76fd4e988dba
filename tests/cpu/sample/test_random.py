"""The stateless random numbers: exact against plain Python, and as random as a test can see."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.sample.random import (
    BLOCK,
    block_arrivals,
    gumbel_noise,
    mix,
    negative_log,
    random_bits,
    request_key,
    row_keys,
)
from tests.cpu.sample.helpers import chi_square_z

M32 = 2**32 - 1


def plain_mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32
    x = (x ^ (x >> 15)) * 0x735A2D97 % 2**32
    return x ^ (x >> 15)


def plain_bits(seed: int, position: int, counter: int) -> int:
    key = []
    for word in (0x9E3779B9, 0xBB67AE85):
        for absorbed in (seed % 2**32, (seed >> 32) % 2**32, 0, position):
            word = plain_mix(word ^ absorbed)
        key.append(word)
    return plain_mix(plain_mix(counter ^ key[0]) ^ key[1])


def plain_noise(seed: int, position: int, token: int) -> float:
    block, lane = divmod(token, 64)
    bits = plain_bits(seed, position, 2**30 + block)
    time = -math.log((bits // 64 + 0.5) / 2**26) / 64
    if bits % 64 != lane:
        time -= math.log((plain_bits(seed, position, token) + 0.5) / 2**32)
    return torch.tensor(-math.log(time), dtype=torch.float32).item()


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return row_keys(torch.tensor([request_key(s) for s in seeds]), torch.tensor(positions))


def noise(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """(rows, vocab) noise, every block computed."""
    num_blocks = -(-vocab // BLOCK)
    times, offsets = block_arrivals(keys, num_blocks)
    rows = len(keys)
    blocks = torch.arange(num_blocks).repeat(rows)
    full = gumbel_noise(
        keys.repeat_interleave(num_blocks, 0), blocks, times.flatten(), offsets.flatten()
    )
    assert (full <= negative_log(times).view(-1, 1)).all(), "a block exceeds its bound"
    return full.view(rows, -1)[:, :vocab]


def test_bits_equal_plain_python_integers() -> None:
    seeds = [0, 1, 42, 2**63, 2**64 - 1, -1, -(2**63), 0x0123456789ABCDEF]
    positions = [0, 1, 2, 77, 4095, 131071, 2**31, 2**32 - 1]
    counters = [0, 1, 63, 64, 49151, 262143, 2**30 - 1, 2**30, 2**30 + 5, 2**32 - 1]
    got = random_bits(keys_of(seeds, positions)[:, None], torch.tensor(counters)).tolist()
    for seed, position, row in zip(seeds, positions, got, strict=True):
        assert row == [plain_bits(seed, position, counter) for counter in counters]


def test_noise_equals_plain_python_floats() -> None:
    got = noise(keys_of([7, -3], [0, 1234]), 1000)
    for row, (seed, position) in enumerate([(7, 0), (-3, 1234)]):
        expected = [plain_noise(seed, position, token) for token in range(1000)]
        assert got[row].tolist() == expected


def test_mixer_is_a_bijection_with_avalanche() -> None:
    """Each input bit flips each output bit with probability near one half."""
    x = torch.arange(2**13) * 524287 % 2**32
    assert len(mix(x).unique()) == len(x.unique()) == 2**13
    for bit in range(32):
        flipped = mix(x) ^ mix(x ^ (1 << bit))
        rates = ((flipped[:, None] >> torch.arange(32)) & 1).double().mean(0)
        assert ((rates - 0.5).abs() < 0.1).all(), bit


def test_python_and_tensor_words_mix_alike() -> None:
    values = [0, 1, 65535, 2**31, M32]
    assert mix(torch.tensor(values)).tolist() == [mix(v) for v in values]


@pytest.mark.parametrize("what", ["seeds", "positions", "tokens"])
@pytest.mark.parametrize("shift", [0, 8, 24])
def test_bits_are_uniform_along_neighbouring(what: str, shift: int) -> None:
    n = 1 << 17
    many, one = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    if what == "seeds":
        first = torch.tensor([request_key(s) for s in range(n)])
        bits = random_bits(row_keys(first, one + 5), one + 9)
    elif what == "positions":
        bits = random_bits(row_keys(torch.tensor([request_key(3)]).expand(n, 2), many), one + 9)
    else:
        bits = random_bits(keys_of([3], [5])[:, None], many)[0]
    counts = torch.bincount((bits >> shift) & 255, minlength=256)
    assert abs(chi_square_z(counts, torch.full((256,), n / 256))) < 4.5


@pytest.mark.parametrize("what", ["seeds", "positions", "tokens"])
def test_neighbours_are_independent(what: str) -> None:
    """Joint histogram of the top 4 bits of x and of its neighbour, at distances 1, 2 and 64."""
    rows, vocab = 512, 512
    base = torch.tensor([request_key(s) for s in range(rows)])
    for distance in (1, 2, 64):
        if what == "seeds":
            bits = random_bits(row_keys(base, torch.full((rows,), 3))[:, None], torch.arange(vocab))
        else:
            keys = row_keys(base[:1].expand(rows, 2), torch.arange(rows))
            bits = random_bits(keys[:, None], torch.arange(vocab))
        if what == "tokens":
            bits = bits.t()
        pair = (bits[distance:] >> 28) * 16 + (bits[:-distance] >> 28)
        counts = torch.bincount(pair.flatten(), minlength=256)
        assert abs(chi_square_z(counts, torch.full((256,), pair.numel() / 256))) < 4.5


def test_streams_and_seed_halves_differ() -> None:
    """n completions, and streams of one request, share nothing; high seed bits count."""
    keys = {request_key(s, stream) for s in (1, 2, 2**32 + 1, 2**63 + 1) for stream in range(4)}
    assert len(keys) == 16


def test_noise_is_gumbel_within_and_across_blocks() -> None:
    """exp(-exp(-g)) is uniform for each lane; the arg-max over lanes is uniform too."""
    keys = row_keys(torch.tensor([request_key(11)]).expand(4000, 2), torch.arange(4000))
    g = noise(keys, 2 * BLOCK)
    uniform = (-(-g.double()).exp()).exp()
    for lanes in (uniform[:, :1], uniform[:, 63:65], uniform):
        counts = torch.bincount((lanes * 64).long().flatten(), minlength=64)
        assert abs(chi_square_z(counts, torch.full((64,), lanes.numel() / 64))) < 4.5
    winners = torch.bincount(g.argmax(1), minlength=128)
    assert abs(chi_square_z(winners, torch.full((128,), 4000 / 128))) < 4.5


def test_lanes_of_a_block_are_independent() -> None:
    """Sharing the first arrival must not correlate lanes: pairwise joint histograms are flat."""
    keys = row_keys(torch.tensor([request_key(12)]).expand(20000, 2), torch.arange(20000))
    cells = ((-(-noise(keys, BLOCK).double()).exp()).exp() * 8).long()
    for a, b in ((0, 1), (5, 40), (62, 63)):
        counts = torch.bincount(cells[:, a] * 8 + cells[:, b], minlength=64)
        assert abs(chi_square_z(counts, torch.full((64,), 20000 / 64))) < 4.5
    top_two = cells[:, :8].sort(1).values[:, -2:]  # the tail is where a shared bound would show
    both_high = (top_two == 7).all(1).double().mean().item()
    expected = 1 - (7 / 8) ** 8 - 8 * (1 / 8) * (7 / 8) ** 7
    assert abs(both_high - expected) < 0.015
