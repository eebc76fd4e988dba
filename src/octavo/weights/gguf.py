"""GGUF files: a bounds-checked header reader and the tensors under Hugging Face names.

The header is read here because the gguf package's reader takes seconds on a vocabulary; block types
and dequantisation are the package's, which is imported only where such a file is read. Tokenizer code
reads `GGUFFile.metadata` too.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.config.gguf_metadata import NAMES, hf_from_gguf
from octavo.config.model import LoadFormat, ModelConfig
from octavo.config.moe import MAX_EXPERTS
from octavo.errors import ModelLoadError, shown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
# Far above any real file: what a header makes us build stays small even where the file is large.
_MAX_VALUES = 2**24
_MAX_ENTRIES = 2**20
_MAX_THREADS = 4

ROPE_FREQS = "rope_freqs.weight"


@cache
def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        need = "GGUF files need the package gguf: pip install gguf"
        raise ModelLoadError(f"{need} ({error})") from error
    return gguf


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file."""

    shape: tuple[int, ...]
    """As torch would say it: rows first."""
    type: GGMLQuantizationType
    offset: int
    """Of the first byte, from the start of the file."""
    num_bytes: int


class GGUFFile:
    """An open GGUF file. Raises ModelLoadError, naming file and place, for anything malformed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise ModelLoadError(f"looked for {path.absolute()}: no such file")
            with path.open("rb") as file:
                if path.stat().st_size < 24:
                    raise ModelLoadError(f"{path}: too short to be a GGUF file")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path}: unreadable ({error})") from error
        self._at = 0
        self.metadata: dict[str, Any] = {}
        """Key -> Python value; arrays are lists."""
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._error(f"malformed or truncated header ({error})") from error

    def _error(self, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {text} (byte {self._at} of {len(self._bytes)})")

    def _read_header(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise self._error("not a GGUF file")
        self._at = 4
        version = self._unpack("I")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported (supported: 2, 3)")
        num_tensors, num_keys = self._unpack("Q"), self._unpack("Q")
        if max(num_tensors, num_keys) > _MAX_ENTRIES:
            raise self._error(f"{num_tensors} tensors and {num_keys} keys: at most {_MAX_ENTRIES}")
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                raise self._error(f"duplicate key {shown(key)}")
            self.metadata[key] = self._value(self._unpack("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._error(f"general.alignment={shown(alignment)} is not a positive integer")
        base = -(-self._at // alignment) * alignment
        expected = 0
        for name, info in infos:
            start = base + info.offset
            if name in self.tensors:
                raise self._error(f"duplicate tensor {shown(name)}")
            # Tensors lie one after the other: elsewhere a damaged offset would load other bytes.
            if info.offset != expected:
                raise self._error(f"tensor {shown(name)} is at {info.offset}, expected {expected}")
            expected += -(-info.num_bytes // alignment) * alignment
            if start + info.num_bytes > len(self._bytes):
                raise self._error(f"tensor {shown(name)} ends past the end of the file: truncated?")
            self.tensors[name] = TensorInfo(info.shape, info.type, start, info.num_bytes)

    def _unpack_all(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._bytes, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _unpack(self, code: str) -> Any:
        return self._unpack_all(f"<{code}")[0]

    def _string(self) -> str:
        length = self._unpack("Q")
        if length > len(self._bytes) - self._at:
            raise self._error(f"a string of {length} bytes does not fit the file")
        text = self._bytes[self._at : self._at + length]
        self._at += length
        return text.decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _BOOL:
            return bool(self._unpack("B"))
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind != _ARRAY or depth > 4:
            raise self._error(f"unknown value type {kind}")
        inner, count = self._unpack("I"), self._unpack("Q")
        if count > min(len(self._bytes) - self._at, _MAX_VALUES):
            raise self._error(f"an array of {count} values does not fit the file, or {_MAX_VALUES}")
        if inner in _SCALARS:
            return list(self._unpack_all(f"<{count}{_SCALARS[inner]}"))
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _tensor_info(self) -> tuple[str, TensorInfo]:
        """Name and info; the offset is still relative to the data section."""
        name, num_dims = self._string(), self._unpack("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"tensor {shown(name)} has {num_dims} dimensions")
        shape = tuple(self._unpack("Q") for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise self._error(f"tensor {shown(name)} of shape {shape} is empty")
        number, offset = self._unpack("I"), self._unpack("Q")
        gguf = _library()
        try:
            kind = gguf.GGMLQuantizationType(number)
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise self._error(f"tensor {shown(name)} has unknown type {number}") from error
        if shape[-1] % per_block:
            raise self._error(f"tensor {shown(name)}: rows of {shape[-1]} are no whole blocks")
        num_bytes = math.prod(shape) // per_block * block_bytes
        return name, TensorInfo(shape, kind, offset, num_bytes)

    def tensor(self, name: str, index: int | None = None, packed: bool = False) -> torch.Tensor:
        """The tensor, dequantised: float32, or the stored type if that is F16 or BF16.

        With `index` only that one of its parts along the first dimension; with `packed` as it is
        stored: (rows, bytes of a row).
        """
        info = self.tensors[name]
        if index is not None:
            size = info.num_bytes // info.shape[0]
            info = TensorInfo(info.shape[1:], info.type, info.offset + index * size, size)
        data = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.offset)
        if packed:
            return torch.from_numpy(data.copy()).view(info.shape[0], -1)
        gguf = _library()
        kinds = gguf.GGMLQuantizationType
        plain = {kinds.F32: torch.float32, kinds.F16: torch.float16, kinds.BF16: torch.bfloat16}
        if info.type in plain:
            # A copy: torch wants writable memory, and the file may close before the tensor dies.
            return torch.from_numpy(data.copy()).view(plain[info.type]).view(info.shape)
        try:
            with np.errstate(all="ignore"):  # damaged data; logits that are not finite are told
                values = gguf.dequantize(data.reshape(*info.shape[:-1], -1), info.type)
        except NotImplementedError as error:
            text = f"tensor {shown(name)}: type {info.type.name} cannot be dequantised"
            raise ModelLoadError(f"{self.path}: {text}") from error
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).view(info.shape)


def opened(path: Path) -> GGUFFile:
    """A GGUFFile. Config, tokenizer and weights ask one after the other; the header is read once."""
    found = path.stat() if path.is_file() else None
    return kept(path, found and (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=1)
def kept(path: Path, identity: object) -> GGUFFile:
    return GGUFFile(path)


def read_config(file: GGUFFile, load_format: LoadFormat, dtype: str) -> ModelConfig:
    """The file's ModelConfig, by way of the same checks as that of a config.json."""
    types = {name: info.type.name for name, info in file.tensors.items()}
    hf = hf_from_gguf(file.metadata, types, file.path)
    config = ModelConfig.from_hf(hf, file.path, load_format, dtype)
    if ROPE_FREQS not in file.tensors:
        return config
    shape, expected = file.tensors[ROPE_FREQS].shape, (config.head_dim // 2,)
    if shape != expected:
        text = f"{ROPE_FREQS} has shape {shape}, expected {expected}"
        raise ModelLoadError(f"{file.path}: {text}")
    divisors = tuple(file.tensor(ROPE_FREQS).tolist())
    if not all(0 < value < math.inf for value in divisors):
        raise ModelLoadError(f"{file.path}: {ROPE_FREQS}: not all positive and finite")
    return replace(config, rope=replace(config.rope, frequency_divisors=divisors))


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint by its Hugging Face name, and where it is in the file."""

    name: str
    shape: tuple[int, ...]
    stored: str
    expert: int | None = None
    """Which part of a tensor that holds those of all experts."""


def weights(file: GGUFFile) -> Iterator[Weight]:
    """All weights. One whose name is not known keeps it, so that the loader can complain about it."""
    is_gemma = file.metadata.get("general.architecture") == "gemma3"
    layer_names = NAMES["layer_tensors"] | (NAMES["gemma3_layer_tensors"] if is_gemma else {})
    for stored, info in file.tensors.items():
        name, shape = _hf_name(stored, layer_names), info.shape
        if "_exps." in stored and len(shape) == 3 and shape[0] <= MAX_EXPERTS:
            for expert in range(shape[0]):
                yield Weight(name.replace("{}", str(expert)), shape[1:], stored, expert)
        elif "_inp_shexp." in stored and len(shape) == 1:
            yield Weight(name, (1, *shape), stored)
        elif stored != ROPE_FREQS:
            yield Weight(name, shape, stored)


def iterate_tensors(
    file: GGUFFile, config: ModelConfig, packed: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by their Hugging Face names, rows of q and k in Hugging Face order.

    packed: those that are wanted as they are stored, (rows, bytes of a row).
    A few threads dequantise ahead of the caller: at most _MAX_THREADS + 1 tensors wait.
    """

    def read(weight: Weight) -> tuple[str, torch.Tensor]:
        tensor = file.tensor(weight.stored, weight.expert, weight.name in packed)
        # Only Llama files are permuted: the rotary embedding of other families is stored as it is.
        if config.architecture in ("LlamaForCausalLM", "MixtralForCausalLM"):
            if ".attn_q." in weight.stored:
                tensor = unpermute(tensor, config.num_heads)
            elif ".attn_k." in weight.stored:
                tensor = unpermute(tensor, config.num_kv_heads)
        if config.norm_unit_offset and weight.stored.endswith("norm.weight"):
            tensor = tensor.float() - 1.0  # the file has what is multiplied by
        return weight.name, tensor if weight.name in packed else tensor.view(weight.shape)

    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "gguf") as pool:
        waiting: deque[Future[tuple[str, torch.Tensor]]] = deque()
        for weight in weights(file):
            waiting.append(pool.submit(read, weight))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names unchanged."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES["tensors"]:
        return f"{NAMES['tensors'][stem]}.{kind}"
    pieces = stem.split(".", 2)
    if len(pieces) == 3 and pieces[0] == "blk" and pieces[2] in layer_names:
        return f"model.layers.{pieces[1]}.{layer_names[pieces[2]]}.{kind}"
    return name


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Llama GGUF files store each head's rows as (pair, half); Hugging Face wants (half, pair).

    tensor: (num_heads * head_dim, ...) -> the same shape.
    """
    if tensor.shape[0] % (2 * num_heads):
        return tensor  # The loader reports the shape.
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
