"""GGUF files: tensors equal the safetensors they were made from; malformed files are refused."""

from __future__ import annotations

import os
import random
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from octavo.config.engine import EngineArgs
from octavo.errors import ConfigError, ModelLoadError, OctavoError
from octavo.models.registry import weight_map
from octavo.weights.checkpoint import load_model_config
from octavo.weights.gguf import GGUFFile, iterate_tensors, opened, unpermute
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits, settings
from tests.cpu.weights.helpers import (
    pack,
    permute,
    save_folder,
    save_gguf,
    save_small_gguf,
    weights,
)

KINDS = gguf.GGMLQuantizationType
# Bound on |dequantised - original| for data from N(0, 1), in units of 1.
BOUNDS = {
    KINDS.F16: 2e-3,
    KINDS.BF16: 2e-2,
    KINDS.Q8_0: 0.03,
    KINDS.Q5_0: 0.4,
    KINDS.Q5_1: 0.25,
    KINDS.Q4_0: 0.8,
    KINDS.Q4_1: 0.5,
}


@pytest.mark.parametrize("tied", [True, False])
def test_w03_f32_gguf_equals_its_safetensors(tied: bool, tmp_path: Path) -> None:
    """W03: rows of q and k are permuted in a Llama GGUF file; with GQA, unequal q and k heads.

    All tensors and the logits are equal, and would not be without undoing the permutation.
    """
    changes = {"tie_word_embeddings": tied, "head_dim": 24}
    tensors = save_folder(tmp_path, **changes)
    path = tmp_path / "model.gguf"
    save_gguf(path, settings(**changes), tensors)
    ours = load_model_config(EngineArgs(str(path)))
    theirs = load_model_config(EngineArgs(str(tmp_path)))
    assert ours.tie_word_embeddings is tied
    assert ours.dtype == "float32"
    loaded = dict(iterate_tensors(GGUFFile(path), ours))
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert_same_bits(tensor, tensors[name])
    key = "model.layers.1.self_attn.k_proj.weight"
    assert not torch.equal(permute(tensors[key], 2), tensors[key])
    tokens = torch.randint(3, 131, (40,))
    logits = [PagedModel(config).step_from_empty(tokens) for config in (ours, theirs)]
    # rms_norm_eps passes through float32 in the file.
    assert_close(logits[0], logits[1], 1e-5)


def test_gemma_gguf_equals_its_safetensors(tmp_path: Path) -> None:
    """Four norms a layer, whose weights include the 1; a window, and a rope for each kind of layer."""
    changes = {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 7,
        "sliding_window": 20,
        "rope_theta": 1e6,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    }
    tensors = save_folder(tmp_path, **changes)
    path, counts = tmp_path / "model.gguf", {"attention.sliding_window": 20}
    save_gguf(path, settings(**changes), tensors, architecture="gemma3", counts=counts)
    ours = load_model_config(EngineArgs(str(path)))
    theirs = load_model_config(EngineArgs(str(tmp_path)))
    eps = {"rms_norm_eps": theirs.rms_norm_eps}  # passes through float32 in the file
    assert replace(ours, path=theirs.path, load_format="safetensors", **eps) == theirs
    loaded = dict(iterate_tensors(GGUFFile(path), ours))
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert_close(tensor, tensors[name], 3e-7)
    tokens = torch.randint(3, 131, (60,))
    logits = [PagedModel(config).step_from_empty(tokens) for config in (ours, theirs)]
    assert_close(logits[0], logits[1], 1e-3)


@pytest.mark.parametrize("kind", BOUNDS, ids=lambda kind: kind.name)
def test_w03_quantised_tensors_stay_within_bounds(kind: KINDS, tmp_path: Path) -> None:
    """W03: each type that gguf can write, against the tensors it was made from."""
    config = settings(intermediate_size=96)
    tensors = weights(config)
    save_gguf(tmp_path / "m.gguf", config, tensors, kind)
    ours = load_model_config(EngineArgs(str(tmp_path / "m.gguf")))
    expected_dtype = "float16" if kind == KINDS.F16 else "bfloat16"
    assert ours.dtype == expected_dtype
    for name, tensor in iterate_tensors(GGUFFile(ours.path), ours):
        assert_close(tensor, tensors[name], BOUNDS[kind])
    asked = load_model_config(EngineArgs(str(ours.path), dtype="float32"))
    assert PagedModel(asked).step_from_empty(torch.arange(3, 20)).isfinite().all()


PACKED = sorted(gguf.quants._type_traits, key=lambda kind: kind.name)


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_every_type_that_the_package_dequantises_loads(kind: KINDS, tmp_path: Path) -> None:
    """Quantised where the package can, else random blocks: each tensor is what the package says."""
    config = settings(hidden_size=256, intermediate_size=512, num_hidden_layers=1, head_dim=64)
    tensors, path = weights(config), tmp_path / "m.gguf"
    save_gguf(path, config, tensors, kind)
    ours = load_model_config(EngineArgs(str(path)))
    assert ours.dtype == "bfloat16"
    for name, tensor in iterate_tensors(GGUFFile(path), ours):
        heads = 4 if ".q_proj." in name else 2 if ".k_proj." in name else 0
        original = tensors[name]
        if original.dim() == 2:
            stored = permute(original, heads) if heads else original
            values = gguf.dequantize(pack(stored.numpy(), kind), kind)
            original = torch.from_numpy(values.copy())
            original = unpermute(original, heads) if heads else original
        assert_same_bits(tensor.float(), original)
    assert PagedModel(ours, num_blocks=2).step_from_empty(torch.arange(3, 15)).isfinite().all()


NOT_PACKED = (KINDS.Q8_1, KINDS.Q8_K, KINDS.I8, KINDS.I32, KINDS.F64)


@pytest.mark.parametrize("kind", NOT_PACKED, ids=lambda kind: kind.name)
def test_a_type_that_cannot_be_dequantised_is_named(kind: KINDS, tmp_path: Path) -> None:
    config = settings(hidden_size=256, intermediate_size=512, num_hidden_layers=1, head_dim=64)
    save_gguf(tmp_path / "m.gguf", config, weights(config), kind)
    with pytest.raises(ModelLoadError, match=rf"tensor '\S+': type {kind.name} cannot"):
        PagedModel(load_model_config(EngineArgs(str(tmp_path / "m.gguf"))))


def test_smollm2_tensors_equal_the_gguf_package(smollm2_path: Path) -> None:
    """Our header reader against gguf's: same metadata, same tensors."""
    file, reader = GGUFFile(smollm2_path), gguf.GGUFReader(smollm2_path)
    theirs = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata.keys() == theirs.keys()
    for name in theirs:
        if not name.startswith("tokenizer.ggml.t"):
            assert file.metadata[name] == theirs[name].contents()
    assert len(file.tensors) == len(reader.tensors) == 272
    for tensor in reader.tensors[:12]:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert_same_bits(file.tensor(tensor.name), values)


def test_rope_freqs_become_divisors(tmp_path: Path) -> None:
    """Llama 3 GGUF files carry the rope scaling as a tensor of divisors."""
    config = settings()
    divisors = [1.0] * 4 + [8.0] * 4
    save_gguf(tmp_path / "m.gguf", config, weights(config), rope_freqs=divisors)
    ours = load_model_config(EngineArgs(str(tmp_path / "m.gguf")))
    assert ours.rope.frequency_divisors == tuple(divisors)
    assert PagedModel(ours).step_from_empty(torch.arange(3, 20)).isfinite().all()


@pytest.mark.parametrize("last", [[], [0.0], [-1.0], [float("nan")], [float("inf")]])
def test_bad_rope_freqs_are_named(last: list[float], tmp_path: Path) -> None:
    path, config = tmp_path / "m.gguf", settings()
    save_gguf(path, config, weights(config), rope_freqs=[1.0] * 7 + last)
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight(: not all positive| has shape)"):
        load_model_config(EngineArgs(str(path)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole GGUF file of a tiny model."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    config = settings(num_hidden_layers=1, vocab_size=33)
    save_gguf(path, config, weights(config))
    return path.read_bytes()


def load(path: Path, content: bytes) -> None:
    """Config and weights of a file with this content."""
    path.write_bytes(content)
    config = load_model_config(EngineArgs(str(path)))
    PagedModel(config, num_blocks=2)


def test_whole_file_loads(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    load(path, small)
    config = load_model_config(EngineArgs(str(path)))
    loaded = dict(iterate_tensors(GGUFFile(path), config))
    assert set(loaded) == set(weight_map(config))
    assert all(tensor.isfinite().all() for tensor in loaded.values())


@pytest.mark.parametrize("length", [0, 3, 20, 24, 100, 500, 1500, -1, -1000])
def test_truncated_file_is_refused(small: bytes, length: int, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        load(tmp_path / "m.gguf", small[:length])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"GGUF", b"GGML", "not a GGUF file"),
        (b"GGUF\3", b"GGUF\7", "version 7"),
        (b"llama.block_count", b"llama.block_xount", "num_hidden_layers"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_z.weight", "q_proj.weight"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", "duplicate tensor"),
        (b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lxama", "general.architecture='lxama'"),
    ],
)
def test_edited_file_is_refused_by_name(
    small: bytes, old: bytes, new: bytes, words: str, tmp_path: Path
) -> None:
    assert old in small
    with pytest.raises((ModelLoadError, ConfigError), match=words):
        load(tmp_path / "m.gguf", small.replace(old, new, 1))


def test_huge_counts_allocate_nothing(tmp_path: Path) -> None:
    """A header that promises 2^60 keys, or a string of 2^62 bytes, ends with an error at once."""
    many_keys = b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60)
    long_key = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62)
    array = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 61)
    for content in (many_keys, long_key, array):
        with pytest.raises(ModelLoadError):
            load(tmp_path / "m.gguf", content)


def test_random_damage_never_crashes(small: bytes, tmp_path: Path) -> None:
    """300 files with damaged headers: each loads or raises an error of ours."""
    chooser = random.Random(0)
    header = small.index(b"blk.0.ffn_down") + 400
    outcomes = []
    for _ in range(300):
        content = bytearray(small)
        for _ in range(chooser.randint(1, 4)):
            content[chooser.randrange(header)] = chooser.choice([0, 1, 255, chooser.randrange(256)])
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        try:
            config = load_model_config(EngineArgs(str(path)))
            dict(iterate_tensors(GGUFFile(path), config))
            outcomes.append("loaded")
        except OctavoError:
            outcomes.append("refused")
    assert set(outcomes) == {"loaded", "refused"}  # the damage is neither harmless nor total


def test_load_weights_is_repeatable_from_one_file(small: bytes, tmp_path: Path) -> None:
    """Nothing about the file is used up by reading it."""
    path = tmp_path / "m.gguf"
    path.write_bytes(small)
    model = PagedModel(load_model_config(EngineArgs(str(path))), num_blocks=2)
    again = PagedModel(model.config, num_blocks=2)
    tokens = torch.arange(3, 15)
    assert_same_bits(model.step_from_empty(tokens), again.step_from_empty(tokens))


def test_a_file_put_in_the_place_of_another_is_read(tmp_path: Path) -> None:
    """Also with its time (rsync -t), and under the name that was asked for before."""
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    save_small_gguf(first, "gpt2")
    save_small_gguf(second, "llama")
    os.utime(second, ns=(first.stat().st_mtime_ns, first.stat().st_mtime_ns))
    before = opened(first)
    assert opened(first) is before
    second.replace(first)
    after = opened(first)
    assert after.metadata["tokenizer.ggml.model"] != before.metadata["tokenizer.ggml.model"]
