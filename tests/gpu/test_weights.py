"""Loading onto the GPU: the bits of a CPU load from files, dummy weights made there, and the times.

`pytest -s` shows the times.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.cpu.paged import settings
from tests.gpu.model_file import demo_model_path

from octavo.attention.reference import ReferenceAttention
from octavo.config.engine import EngineArgs
from octavo.config.model import ModelConfig
from octavo.errors import ModelLoadError
from octavo.layers.linear import Linear
from octavo.models.decoder import DecoderModel
from octavo.models.registry import build_model, weight_map
from octavo.weights import safetensors
from octavo.weights.checkpoint import load_model_config
from octavo.weights.loader import fill, load_model, load_weights
from octavo.weights.upload import CHUNK_BYTES, FileRange, FileUpload

CPU = torch.device("cpu")
# As the engine names it: without an index.
CUDA = torch.device("cuda")
# The embedding takes three chunks in fp32, the last one ragged.
SMALL = settings(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=20011,
    hidden_size=512,
    intermediate_size=1111,
    num_attention_heads=8,
    head_dim=96,
)
LARGE = settings(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    dtype="bfloat16",
)


def build(config: ModelConfig, device: torch.device) -> DecoderModel:
    """The model with all parameters NaN, so that what is not filled shows."""
    backend = ReferenceAttention(config.num_heads, config.kv_cache_spec(16))
    model = build_model(config, backend, device)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def save(folder: Path, content: dict[str, Any], stored: torch.dtype, shards: int = 3) -> None:
    """A random checkpoint of this config.json, its tensors dealt out in turn."""
    (folder / "config.json").write_text(json.dumps(content))
    targets = weight_map(ModelConfig.from_hf(content, folder, "safetensors"))
    index: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {
            key: torch.randn(targets[key].shape, device=CUDA).to(stored).cpu()
            for key in sorted(targets)[number::shards]
        }
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": index}))


def assert_equal_loads(config: ModelConfig) -> None:
    """Every parameter filled, with the same bits on both devices."""
    ours, expected = build(config, CUDA), build(config, CPU)
    for model in (ours, expected):
        load_weights(model, config)
    wanted = dict(expected.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.is_cuda
        assert parameter.isfinite().all(), name
        assert torch.equal(parameter.cpu(), wanted[name]), name


def upload_often(source: FileRange, target: torch.Tensor) -> None:
    with FileUpload(target.device) as upload:
        for _ in range(100):
            upload.start(source, target.dtype, target)


def seconds(function: Any, *args: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function(*args)
    torch.cuda.synchronize()
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "bfloat16"),
        (torch.float16, "float32"),
        (torch.float32, "float16"),
    ],
)
def test_safetensors_load_as_on_the_cpu(stored: torch.dtype, asked: Any, tmp_path: Path) -> None:
    """Sharded; stored and wanted dtype alike or not; tensors larger and smaller than a chunk."""
    save(tmp_path, SMALL, stored)
    assert SMALL["vocab_size"] * SMALL["hidden_size"] * 4 > 2 * CHUNK_BYTES
    assert_equal_loads(load_model_config(EngineArgs(str(tmp_path), dtype=asked)))


def test_the_demo_model_loads_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU keeps no blocks: a GPU never does."""
    pytest.importorskip("gguf", reason="reading GGUF needs the package gguf")
    monkeypatch.setattr(Linear, "keep_blocks", lambda *_: 0)
    assert_equal_loads(load_model_config(EngineArgs(str(demo_model_path()))))


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    """Or that went away after its header was read; other reads do not hang."""
    path = tmp_path / "part.safetensors"
    path.write_bytes(bytes(1000))
    target = torch.empty(600, dtype=torch.float32, device=CUDA)
    for source, words in (
        (FileRange(path, 0, 2400), r"part\.safetensors: truncated at byte 1000"),
        (FileRange(tmp_path / "gone", 0, 2400), "gone: unreadable"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            upload_often(source, target)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path, SMALL, torch.bfloat16)
    config = load_model_config(EngineArgs(str(tmp_path)))
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    model = build(config, CUDA)
    with pytest.raises(ModelLoadError, match=f"{shard.name}: unreadable or truncated"):
        load_weights(model, config)


def test_a_failed_load_leaves_no_reader_behind(tmp_path: Path) -> None:
    """An error found while reads are under way; the same process can load the next model."""
    save(tmp_path, SMALL, torch.bfloat16)
    config = load_model_config(EngineArgs(str(tmp_path)))
    longer = ModelConfig.from_hf({**SMALL, "num_hidden_layers": 3}, tmp_path, "safetensors")
    with pytest.raises(ModelLoadError, match=r"missing tensors: model\.layers\.2\."):
        load_weights(build(longer, CUDA), longer)
    assert_equal_loads(config)


def test_the_memory_of_the_gpu_is_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is built."""
    config = ModelConfig.from_hf(SMALL, tmp_path, "dummy")
    backend = ReferenceAttention(config.num_heads, config.kv_cache_spec(16))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**6, 10**12))
    with pytest.raises(ModelLoadError, match=r"takes \d+ bytes.* 1000000 bytes of memory"):
        load_model(config, backend, CUDA)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dummy_weights_depend_on_name_and_seed(dtype: Any, tmp_path: Path) -> None:
    """uniform(-1e-3, 1e-3) in the model's dtype, the same for a seed, every parameter its own."""
    config = ModelConfig.from_hf(SMALL, tmp_path, "dummy", dtype)
    models = [build(config, CUDA) for _ in range(3)]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        load_weights(model, config, seed)
    first, again, other = (dict(model.named_parameters()) for model in models)
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name]), name
        assert not torch.equal(parameter, other[name]), name
        values = parameter.float()
        assert values.abs().max() <= 1.001e-3, name
        assert 4.5e-4 < values.std() < 7e-4, name
        assert (values != 0).float().mean() > 0.9, name
    layers = [first[f"layers.{index}.self_attn.qkv_proj.weight"] for index in (0, 1)]
    assert not torch.equal(*layers)


def test_time_of_eight_billion_dummy_weights(tmp_path: Path) -> None:
    """The shape of Qwen3-8B, 16.4 GB. The first kernels of a process take their time before it."""
    warm = ModelConfig.from_hf(SMALL, tmp_path, "dummy", "bfloat16")
    load_weights(build(warm, CUDA), warm)
    config = ModelConfig.from_hf(LARGE, tmp_path, "dummy")
    backend = ReferenceAttention(config.num_heads, config.kv_cache_spec(16))
    built: list[DecoderModel] = []
    building = seconds(lambda: built.append(build_model(config, backend, CUDA)))
    filling = seconds(load_weights, built[0], config)
    size = sum(parameter.nbytes for parameter in built[0].parameters())
    assert size == config.weight_bytes()
    assert all(parameter.any() for parameter in built[0].parameters())
    print(f"\n{size / 1e9:.1f} GB of dummy weights: built in {building:.2f} s", end="")
    print(f", filled in {filling:.3f} s ({size / filling / 1e9:.0f} GB/s)")


def test_speed_of_a_safetensors_load(tmp_path: Path) -> None:
    """4 layers of that shape, from files in the page cache, beside copies from the memory map."""
    changes = {**LARGE, "num_hidden_layers": 4, "vocab_size": 32000}
    save(tmp_path, changes, torch.bfloat16)
    config = load_model_config(EngineArgs(str(tmp_path)))
    model = build(config, CUDA)
    targets, size = weight_map(config), config.weight_bytes()

    def mapped() -> None:
        fill(model, targets, safetensors.iterate_tensors(tmp_path), "mapped")

    times = [(seconds(load_weights, model, config), seconds(mapped)) for _ in range(2)]
    print(f"\n{size / 1e9:.2f} GB of safetensors:", end="")
    for ours, theirs in times:
        print(f" {size / ours / 1e9:.1f} GB/s (mapped {size / theirs / 1e9:.1f})", end="")
    print()
