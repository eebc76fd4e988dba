"""Damaged GGUF headers: a named error or a model that loads, quickly and in little memory."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.config.engine import EngineArgs
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.tokenizer import load_tokenizer
from octavo.errors import ConfigError, ModelLoadError, OctavoError
from octavo.weights.checkpoint import load_model_config
from octavo.weights.gguf import GGUFFile
from tests.cpu.engine.helpers import BYTE_CHARS
from tests.cpu.paged import PagedModel, settings
from tests.cpu.weights.helpers import gguf_name, weights

WORDS = ["<|end|>", "he", "user"]
EXTREMES = [
    0,
    1,
    2,
    7,
    127,
    255,
    2**15,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**64 - 1,
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny Llama with its tokenizer, its chat template and rope divisors."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    config = settings(num_hidden_layers=1, vocab_size=256 + len(WORDS))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*BYTE_CHARS.values(), *WORDS])
    writer.add_token_types([1] * 256 + [3, 1, 4])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in weights(config).items():
        data = np.ascontiguousarray(tensor.numpy())
        if data.ndim == 2 and "down" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), data)
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read_text_parts(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode("hello <|end|> 12"))
    ChatTemplate.load(None, tokenizer)


def read_model(path: Path) -> None:
    PagedModel(load_model_config(EngineArgs(str(path))), num_blocks=2)


def damaged(small: bytes, seed: int) -> bytes:
    """The file with one to four changes in its header: bytes, numbers, names, lengths, cuts."""
    chooser = random.Random(seed)
    end = small.index(b"rope_freqs.weight") + 40
    content = bytearray(small)
    for _ in range(chooser.randint(1, 4)):
        # Half of the changes hit the small keys and the tensor list, not the long vocabulary.
        words = small.index(b"tokenizer.ggml.tokens"), small.index(b"tokenizer.ggml.merges")
        spots = [range(4, words[0]), range(words[1], end), range(4, end)]
        at = chooser.choice(chooser.choice(spots))
        kind = chooser.randrange(5)
        if kind == 0:
            content[at] = chooser.randrange(256)
        elif kind == 1:
            content[at] ^= 1 << chooser.randrange(8)
        elif kind == 2:
            content[at : at + 8] = struct.pack("<Q", chooser.choice(EXTREMES))
        elif kind == 3:
            content[at : at + 4] = struct.pack("<I", chooser.choice(EXTREMES) % 2**32)
        else:
            width = chooser.randint(1, 16)
            content[at : at + width] = b"" if chooser.random() < 0.5 else chooser.randbytes(width)
    return bytes(content)


def check(small: bytes, seeds: range, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each damaged file ends in an error of ours or loads, within two seconds of this thread."""
    monkeypatch.setattr("octavo.config.machine.available_memory", lambda: 2**28)
    path.write_bytes(small)
    parts = (read_text_parts, read_model)
    for part in parts:
        part(path)
    refused = 0
    for seed in seeds:
        path.write_bytes(damaged(small, seed))
        for part in parts:
            start, told = time.thread_time(), ""
            try:
                part(path)
            except OctavoError as error:
                told = str(error)
                refused += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
            assert len(told) < 2000, f"seed {seed}"
            assert time.thread_time() - start < 2.0, f"seed {seed}"
    assert len(seeds) // 2 < refused < 2 * len(seeds)


def test_damaged_headers(small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(small, range(300), tmp_path / "m.gguf", monkeypatch)


@pytest.mark.soak
def test_many_damaged_headers(
    small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(small, range(300, 2300), tmp_path / "m.gguf", monkeypatch)


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
