"""Damaged checkpoints and odd names: a named error at once, whatever the files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine import EngineArgs
from octavo.errors import ConfigError, ModelLoadError
from octavo.weights import hub
from octavo.weights.checkpoint import load_model_config
from octavo.weights.hub import resolve_model_path
from tests.cpu.paged import PagedModel, settings
from tests.cpu.weights.helpers import save_folder

INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000


def load(folder: Path, load_format: Any = "auto") -> PagedModel:
    return PagedModel(load_model_config(EngineArgs(str(folder), load_format=load_format)))


def rewrite(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(settings(**changes)))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("content", [DEEP, "\xff", "3", '{"a": 1' + "0" * 5000 + "}"])
def test_unreadable_json_is_named(name: str, content: str, tmp_path: Path) -> None:
    save_folder(tmp_path, shards=2)
    (tmp_path / name).write_text(content, "latin-1")
    with pytest.raises(ModelLoadError, match=name):
        load(tmp_path)


@pytest.mark.parametrize("shard", ["x" * 300, "", "..", "a\0b", ["x"], 7])
def test_impossible_shard_names_are_refused(shard: object, tmp_path: Path) -> None:
    save_folder(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load(tmp_path)


def test_a_folder_in_place_of_a_shard_is_missing(tmp_path: Path) -> None:
    save_folder(tmp_path, shards=2)
    shard = "model-00002-of-00002.safetensors"
    (tmp_path / shard).unlink()
    (tmp_path / shard).mkdir()
    with pytest.raises(ModelLoadError, match=f"missing: {shard}"):
        load(tmp_path)


SIZES = ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"]


@pytest.mark.parametrize("key", [*SIZES, "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("value", [2**31 - 2, 10**13, 10**400], ids=["2^31", "1e13", "1e400"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_absurd_sizes_are_refused_before_anything_is_built(
    key: str, value: int, load_format: str, tmp_path: Path
) -> None:
    """Refused as too large, as unlike the checkpoint's tensors, or as more than the memory."""
    save_folder(tmp_path)
    rewrite(tmp_path, **{"num_key_value_heads": 1, "head_dim": 16, key: value})
    with pytest.raises((ModelLoadError, ConfigError)):
        load(tmp_path, load_format)


def test_a_config_larger_than_its_files_names_the_tensor(tmp_path: Path) -> None:
    save_folder(tmp_path)
    rewrite(tmp_path, vocab_size=2**30)
    with pytest.raises(ModelLoadError, match=r"lm_head.*\(131, 64\), expected \(1073741824"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["weights", "max_position_embeddings"])
def test_more_than_the_memory_says_both_numbers(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigabyte is free; the weights, or the rotary tables of a long context, take more."""
    monkeypatch.setattr("octavo.config.machine.available_memory", lambda: 10**9)
    changes = {"weights": {"vocab_size": 10**7}, "max_position_embeddings": {key: 2**24}}
    rewrite(tmp_path, **changes[key])
    with pytest.raises(ModelLoadError, match=rf"takes \d+ bytes.*{key}.* 1000000000 bytes"):
        load(tmp_path, "dummy")
    rewrite(tmp_path)
    load(tmp_path, "dummy")


@pytest.mark.parametrize("eos", ["abc", [[1]], 2.5, -7, [1, -1], True, {"a": 1}])
def test_bad_eos_in_generation_config_is_named(eos: object, tmp_path: Path) -> None:
    rewrite(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        load_model_config(EngineArgs(str(tmp_path), load_format="dummy"))


def test_eos_ids_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    rewrite(tmp_path, eos_token_id=[2, 131, 10**400])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [130, 9999, 2]}')
    config = load_model_config(EngineArgs(str(tmp_path), load_format="dummy"))
    assert config.eos_token_ids == (2, 130)


@pytest.mark.parametrize("name", ["~nosuchuser/m", "x" * 300, "a/" + "x" * 300, "a\0b", "\ud800"])
def test_names_that_no_path_can_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError):
        resolve_model_path(name)


def test_a_revision_of_something_local_is_refused(tmp_path: Path, smollm2_path: Path) -> None:
    for model in (str(tmp_path), str(smollm2_path), hub.DEMO):
        with pytest.raises(ConfigError, match=r"revision='main'.*is local"):
            resolve_model_path(model, "main")


def test_a_hub_repository_of_gguf_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"'a/b'.*no config\.json.*\.gguf.*a/b:Q4_K_M"):
        resolve_model_path("a/b", "main")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_path("a/b", "main") == tmp_path


def test_the_cache_of_the_hub_is_used_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache as huggingface_hub keeps it, by branch and by commit; one GGUF file by its tag."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    for ref in ("main", "v2"):
        (repository / "refs" / ref).write_text(commit)
    save_folder(snapshot)
    for kind in ("Q4_K_M", "Q8_0"):
        (snapshot / f"name-{kind}.gguf").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for revision in (None, "v2", commit):
        assert resolve_model_path("owner/name", revision) == snapshot
    assert load_model_config(EngineArgs("owner/name", revision="v2")).path == snapshot
    assert resolve_model_path("owner/name:Q4_K_M") == snapshot / "name-Q4_K_M.gguf"
    for tag, words in (("Q", "2 .gguf files.*Q4_K_M.gguf, "), ("Q5_0", "0 .gguf files.*: none")):
        with pytest.raises(ModelLoadError, match=words):
            resolve_model_path(f"owner/name:{tag}")
    with pytest.raises(ModelLoadError, match=r"could it be had.*at revision 'v3'"):
        resolve_model_path("owner/name", "v3")


def test_any_failure_of_the_hub_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise RuntimeError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r"a/b.*at revision 'v 1'.*no route"):
        resolve_model_path("a/b", "v 1")
