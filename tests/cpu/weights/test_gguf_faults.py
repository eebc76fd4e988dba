"""Damaged GGUF headers: a named error or a model that loads, quickly and in little memory."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine import EngineArgs
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.tokenizer import load_tokenizer
from octavo.errors import ConfigError, ModelLoadError
from octavo.weights.checkpoint import load_model_config
from octavo.weights.gguf import GGUFFile
from tests.cpu.paged import PagedModel
from tests.cpu.weights.helpers import save_small_gguf


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny Llama with its tokenizer, its chat template and rope divisors."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    save_small_gguf(path)
    return path.read_bytes()


def read_text_parts(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode("hello <|end|> 12"))
    ChatTemplate.load(None, tokenizer)


def read_model(path: Path) -> None:
    PagedModel(load_model_config(EngineArgs(str(path))), num_blocks=2)


def field(small: bytes, key: bytes, value: int) -> bytes:
    """The file with another number for a uint32 key."""
    at = small.index(key) + len(key) + 4
    return small[:at] + struct.pack("<I", value) + small[at + 4 :]


@pytest.mark.parametrize("value", [0, 5, 512, 513, 2**20, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "rope.dimension_count",
    ],
)
def test_counts_that_the_tensors_do_not_have(
    small: bytes, key: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.config.machine.available_memory", lambda: 2**28)
    path = tmp_path / "m.gguf"
    path.write_bytes(field(small, f"llama.{key}".encode(), value))
    if key == "context_length" and value in (5, 512, 513, 2**20):
        read_model(path)  # nothing in the file contradicts it
        return
    with pytest.raises((ModelLoadError, ConfigError)):
        read_model(path)


def one_tensor(dims: list[int], kind: int = 0, keys: bytes = b"", num_keys: int = 0) -> bytes:
    """A header with one tensor "t" and 64 bytes of data."""
    info = struct.pack("<Q", 1) + b"t" + struct.pack("<I", len(dims))
    info += b"".join(struct.pack("<Q", dim) for dim in dims) + struct.pack("<IQ", kind, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, num_keys) + keys + info
    return head + bytes(-len(head) % 32) + bytes(64)


@pytest.mark.parametrize(
    "dims", [[], [0], [0, 2**60], [2**62], [2**32, 2**32], [2**63, 2], [1] * 5, [17], [2**64 - 1]]
)
@pytest.mark.parametrize("kind", [0, 1, 2, 8, 30, 999])
def test_degenerate_shapes_are_refused(dims: list[int], kind: int, tmp_path: Path) -> None:
    """No dimensions, none of length, more bytes than the file has, or no whole blocks."""
    path = tmp_path / "m.gguf"
    path.write_bytes(one_tensor([16]))
    assert GGUFFile(path).tensor("t").shape == (16,)
    path.write_bytes(one_tensor(dims, kind))
    if dims == [17] and kind in (1, 30):
        assert GGUFFile(path).tensor("t").shape == (17,)
        return
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 't'"):
        GGUFFile(path)


@pytest.mark.parametrize("count", [2**24 + 1, 2**40])
def test_arrays_and_counts_are_bounded_by_more_than_the_file(count: int, tmp_path: Path) -> None:
    """A sparse file is large for nothing; what its header can make us build is not."""
    path = tmp_path / "m.gguf"
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, count)
    heads: list[Any] = [
        one_tensor([16], keys=key, num_keys=1),
        b"GGUF" + struct.pack("<IQQ", 3, count, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, count),
    ]
    for head in heads:
        with path.open("wb") as file:
            file.write(head)
            file.truncate(2**36)
        with pytest.raises(ModelLoadError, match=r"m\.gguf: (an array|\d+ tensors)"):
            GGUFFile(path)


@pytest.mark.parametrize("name", ["no.gguf", "x" * 300 + ".gguf", "folder.gguf", "a\0.gguf"])
def test_files_that_cannot_be_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelLoadError):
        GGUFFile(tmp_path / name)
