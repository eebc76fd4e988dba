"""Rotary position embedding: frequencies of each rope kind, and their application to q and k."""

from __future__ import annotations

import math

import torch
from torch import nn

from octavo.config.model import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """(head_dim / 2,) fp32 radians a position, the scaling of the rope kind applied."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Short waves stay, long waves are stretched by `factor`, those between are blended."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


class RotaryEmbedding(nn.Module):
    """Rotates pairs (i, i + head_dim / 2) of q and k by position times frequency.

    One instance serves all layers. cos and sin are fp32 and the product is rounded once.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
    ) -> None:
        super().__init__()
        angles = torch.outer(
            torch.arange(max_positions).float(), inverse_frequencies(rope, head_dim)
        )
        self.register_buffer("cos", angles.cos().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(device), persistent=False)

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
