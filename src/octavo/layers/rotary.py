"""Rotary position embedding: frequencies of each rope kind, and their application to q and k."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from octavo.config.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """(dim / 2,) fp32 radians a position, the scaling of the rope kind applied.

    dim: how many dimensions of a head are rotated (`RopeConfig.rotary_dim`).
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    wavelengths = rope.theta**exponents
    if rope.frequency_divisors:
        wavelengths = torch.tensor(rope.frequency_divisors) * wavelengths
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, dim)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Short waves stay, long waves are stretched by `factor`, those between are blended."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, dim: int) -> torch.Tensor:
    """Pairs before a first border stay, those after a second are stretched by `factor`, and between
    them the two are blended. The borders: pairs that turn beta_fast and beta_slow times in the
    original context."""

    def border(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / (2 * math.pi * turns)
        return dim / 2 * math.log(wavelength) / math.log(rope.theta)

    first, last = border(rope.beta_fast), border(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001  # a step where the borders are the same
    stretched = ((torch.arange(dim // 2).float() - first) / width).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def pair_halves(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """(head_dim,) int64: an order of a head's dimensions in which all pairs are head_dim / 2 apart.

    A checkpoint with partial rotation pairs (i, i + rotary_dim / 2) and leaves the dimensions from
    rotary_dim on alone. Here these follow the first and the second half of the pairs, as pairs
    that never turn. q k^T is the same sum in any order, if q and k agree.
    """
    half = rotary_dim // 2
    rest = torch.arange(rotary_dim, head_dim).chunk(2)
    return torch.cat((torch.arange(half), rest[0], torch.arange(half, rotary_dim), rest[1]))


class RotaryEmbedding(nn.Module):
    """Rotates pairs (i, i + head_dim / 2) of q and k by position times frequency.

    One instance serves all layers. cos and sin are fp32 and the product is rounded once. Where only
    a part of a head is rotated, its dimensions must come in the order of `pair_halves`.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
    ) -> None:
        super().__init__()
        rotated = rope.rotary_dim(head_dim)
        still = (0, (head_dim - rotated) // 2)  # pairs that never turn and are not scaled
        frequencies = F.pad(inverse_frequencies(rope, rotated), still)
        scales = F.pad(torch.full((rotated // 2,), rope.attention_factor), still, value=1.0)
        angles = torch.outer(torch.arange(max_positions).float(), frequencies)
        self.register_buffer("cos", angles.cos().mul_(scales).to(device), persistent=False)
        self.register_buffer("sin", angles.sin().mul_(scales).to(device), persistent=False)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (T,) int64 -> cos and sin, (T, 1, head_dim / 2) fp32, for `forward`.

        On a GPU the whole tables, (max_positions, head_dim / 2): the fused op looks up its rows.
        """
        if positions.is_cuda:
            return self.cos, self.sin
        return self.cos[positions][:, None], self.sin[positions][:, None]

    def forward(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: (T, heads, head_dim) -> the same, rotated, in the dtype of x."""
        cos, sin = tables
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
