"""Random weights for benchmarks and tests: on one device a tensor depends on name and seed only."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch

from octavo.models.decoder import WeightTarget

_CPU = torch.device("cpu")
RANGE = 1e-3
"""As vLLM's. Never zeros: data changes a GPU's clock, and zeros hide errors."""


def iterate_tensors(
    targets: Mapping[str, WeightTarget],
    seed: int,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, torch.Tensor]]:
    """A uniform(-1e-3, 1e-3) tensor for every checkpoint name, made on the device in the dtype.

    CPU and GPU (and GPUs of different models) have different generators, hence different values.
    """
    for name, target in targets.items():
        # torch's CPU generator takes 32 bits of the seed, so both go into one hash.
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        empty = torch.empty(target.shape, dtype=dtype, device=device)
        yield name, empty.uniform_(-RANGE, RANGE, generator=generator)
