"""A folder of safetensors: which files belong to the checkpoint, and its tensors one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import ModelLoadError, shown
from octavo.weights.upload import FileRange

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 256 << 20


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object, or list, in a file of a checkpoint. Raises ModelLoadError naming the file."""
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path}: no such file")
        if (size := path.stat().st_size) > _MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: {size} bytes are more than {_MAX_JSON_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: unreadable ({error})") from error
    except RecursionError:
        raise ModelLoadError(f"{path}: unreadable (nested too deeply)") from None
    if not isinstance(content, kind):
        raise ModelLoadError(f"{path}: not a JSON {'object' if kind is dict else 'list'}")
    return content


def iterate_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, memory-mapped.

    Raises ModelLoadError naming the shard that is missing, unreadable or truncated, or the tensor
    that is missing from it or that the index does not place there: none is there twice.
    """
    for shard, expected in _shards(folder).items():
        with _open(folder / shard) as file:
            names = set(file.keys())
            if expected is not None and names != expected:
                raise ModelLoadError(f"{folder / shard}: {_difference(expected, names)}")
            for name in sorted(names):
                try:
                    tensor = file.get_tensor(name)
                except Exception as error:  # the library raises its own, and torch's
                    raise ModelLoadError(f"{folder / shard}: {name}: {error}") from error
                yield name, tensor


def file_ranges(folder: Path) -> dict[str, FileRange]:
    """Where each tensor of a checkpoint is that `iterate_tensors` finds nothing wrong with."""
    ranges = {}
    for shard in _shards(folder):
        path = folder / shard
        try:
            with _open(path), path.open("rb") as file:  # opened by the library: header is sound
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: unreadable ({error})") from error
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            ranges[name] = FileRange(path, 8 + size + start, end - start)
    return ranges


def stored_dtype(folder: Path) -> str:
    """Name of the dtype of the first tensor, for configs that do not say: "bfloat16"."""
    for _, tensor in iterate_tensors(folder):
        return str(tensor.dtype).removeprefix("torch.")
    raise ModelLoadError(f"{folder}: the checkpoint has no tensors")


def _shards(folder: Path) -> Mapping[str, set[str] | None]:
    """File name -> the tensors the index says it holds; None where there is no index."""
    index = folder / INDEX
    if not index.exists():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if SINGLE in found:
            return {SINGLE: None}
        if not found:
            raise ModelLoadError(f"{folder}: found neither {SINGLE} nor {INDEX}")
        raise ModelLoadError(f"{folder}: {INDEX} is missing, but there are shards: {found}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ModelLoadError(f"{index}: weight_map: {shown(weight_map)} is not an object")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # A plain name, so that an index cannot point out of its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise ModelLoadError(f"{index}: {name}: bad file name {shown(shard)}")
        shards.setdefault(shard, set()).add(name)
    if missing := [shard for shard in shards if not is_file(folder / shard)]:
        raise ModelLoadError(f"{folder}: shards named in {INDEX} are missing: {listed(missing)}")
    return shards


def is_file(path: Path) -> bool:
    """Like Path.is_file, and False for what the system refuses to look at."""
    try:
        return path.is_file()
    except OSError:  # a name that no file can have, or a folder that may not be read
        return False


def listed(names: Iterable[str]) -> str:
    """Names for an error text: the first of them, and how many more there are."""
    names = [name if len(name) <= 255 else shown(name) for name in sorted(names)]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: unreadable or truncated ({error})") from error


def _difference(expected: set[str], found: set[str]) -> str:
    parts = []
    if missing := expected - found:
        parts.append(f"lacks {listed(missing)}, which {INDEX} places here")
    if extra := found - expected:
        parts.append(f"holds {listed(extra)}, which {INDEX} does not place here")
    return "; ".join(parts)
