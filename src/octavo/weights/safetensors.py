"""A folder of safetensors: which files belong to the checkpoint, and its tensors one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def iterate_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, memory-mapped.

    Raises ModelLoadError naming the shard that is missing, unreadable or truncated, or the tensor
    that is missing from it, not in the index, or there twice.
    """
    shards = _shards(folder)
    seen: dict[str, str] = {}
    for shard, expected in shards.items():
        with _open(folder / shard) as file:
            names = set(file.keys())
            if expected is not None and names != expected:
                raise ModelLoadError(f"{folder / shard}: {_difference(expected, names)}")
            for name in sorted(names):
                if name in seen:
                    raise ModelLoadError(f"{folder}: {name} is in {seen[name]} and in {shard}")
                seen[name] = shard
                yield name, file.get_tensor(name)


def stored_dtype(folder: Path) -> str:
    """Name of the dtype of the first tensor, for configs that do not say: "bfloat16"."""
    for _, tensor in iterate_tensors(folder):
        return str(tensor.dtype).removeprefix("torch.")
    raise ModelLoadError(f"{folder}: the checkpoint has no tensors")


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """File name -> the tensors the index says it holds; None where there is no index."""
    index = folder / INDEX
    if not index.exists():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if SINGLE in found:
            return {SINGLE: None}
        if not found:
            raise ModelLoadError(f"{folder}: found neither {SINGLE} nor {INDEX}")
        raise ModelLoadError(f"{folder}: {INDEX} is missing, but there are shards: {found}")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shards: dict[str, set[str] | None] = {}
        for name, shard in weight_map.items():
            # A plain name, so that an index cannot point out of its folder.
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ModelLoadError(f"{index}: {name}: bad file name {shard!r}")
            names = shards.setdefault(shard, set())
            assert names is not None
            names.add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not a safetensors index ({error!r})") from error
    missing = sorted(shard for shard in shards if not (folder / shard).exists())
    if missing:
        raise ModelLoadError(f"{folder}: shards named in {INDEX} are missing: {', '.join(missing)}")
    return shards


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: unreadable or truncated ({error})") from error


def _difference(expected: set[str], found: set[str]) -> str:
    parts = []
    if missing := sorted(expected - found):
        parts.append(f"lacks {', '.join(missing)}, which {INDEX} places here")
    if extra := sorted(found - expected):
        parts.append(f"holds {', '.join(extra)}, which {INDEX} does not place here")
    return "; ".join(parts)
