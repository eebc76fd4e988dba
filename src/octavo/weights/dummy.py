"""Random weights for benchmarks and tests: a tensor depends on its name and the seed only."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch

from octavo.models.decoder import WeightTarget

RANGE = 1e-3
"""As vLLM's. Never zeros: data changes a GPU's clock, and zeros hide errors."""


def iterate_tensors(
    targets: Mapping[str, WeightTarget], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """A float32 uniform(-1e-3, 1e-3) tensor for every checkpoint name."""
    for name, target in targets.items():
        # torch's CPU generator takes 32 bits of the seed, so both go into one hash.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        empty = torch.empty(target.shape)
        yield name, empty.uniform_(-RANGE, RANGE, generator=generator)
