"""From what a user calls a model to its ModelConfig: finds it and reads what it is, no weights yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.config.encoder import PoolingType
from octavo.config.engine import EngineArgs
from octavo.config.fields import FieldReader, token_ids
from octavo.config.model import LoadFormat, ModelConfig
from octavo.errors import ConfigError, InvalidRequestError, ModelLoadError, shown
from octavo.sampling_params import MODEL_DEFAULTS, SamplingParams
from octavo.weights import gguf, hub, safetensors

# How a sentence-transformers folder spells it, by version of the library.
_POOLING: dict[Any, PoolingType] = {"mean": "mean", "cls": "cls"}
_POOLING |= {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_STEPS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def load_model_config(args: EngineArgs) -> ModelConfig:
    """Find `args.model` (folder, .gguf file or Hugging Face id) and read what it is; no weights yet.

    Raises ModelLoadError if it is not there or not supported, ConfigError for a bad field.
    """
    if not args.model:
        raise ConfigError("model='' names no folder, file or Hugging Face id")
    path = hub.resolve_model_path(args.model, args.revision)
    load_format, dtype = args.load_format, args.dtype
    kind: LoadFormat
    if path.is_dir() and not safetensors.is_file(path / "config.json"):
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelLoadError(f"{path}: found no config.json, and {len(files)} .gguf files")
        path = files[0]
    if path.suffix == ".gguf" and not path.is_dir():
        if load_format == "safetensors":
            raise ModelLoadError(f"{path}: load_format is safetensors, but this is a GGUF file")
        kind = "dummy" if load_format == "dummy" else "gguf"
        return gguf.read_config(gguf.opened(path), kind, dtype)
    if load_format == "gguf":
        raise ModelLoadError(f"{path}: load_format is gguf, but this is a folder with config.json")
    config = safetensors.read_json(path / "config.json")
    if load_format != "dummy" and not (config.get("dtype") or config.get("torch_dtype")):
        config["dtype"] = safetensors.stored_dtype(path)
    kind = "dummy" if load_format == "dummy" else "safetensors"
    result = ModelConfig.from_hf(config, path, kind, dtype)
    if result.encoder is not None:
        return _with_pooling(result)
    return _with_generation_config(result, path, args.generation_config == "auto")


def _with_generation_config(config: ModelConfig, folder: Path, sampling: bool) -> ModelConfig:
    """What generation_config.json adds: ends of text, and with `sampling` its defaults for requests.

    Chat models often name their end-of-turn token there only.
    """
    path = folder / "generation_config.json"
    content = safetensors.read_json(path) if path.exists() else {}
    ids = token_ids(content.get("eos_token_id"), f"{path}: eos_token_id", config.vocab_size)
    named = MODEL_DEFAULTS if sampling else ()
    found = {name: content[name] for name in named if content.get(name) is not None}
    if sampling and content.get("do_sample") is False:
        penalty = {name: value for name, value in found.items() if name == "repetition_penalty"}
        found = {"temperature": 0.0, **penalty}
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    return replace(
        config,
        eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ids))),
        sampling_defaults=tuple(found.items()),
    )


def _with_pooling(config: ModelConfig) -> ModelConfig:
    """An embedding model's config with what its folder says; without such files as it is.

    Raises ModelLoadError for steps that we do not build, ConfigError for a bad field.
    """
    encoder = config.encoder
    assert encoder is not None
    settings, modules = config.path / "sentence_bert_config.json", config.path / "modules.json"
    if safetensors.is_file(settings):
        read = FieldReader(safetensors.read_json(settings), str(settings))
        if read.flag("do_lower_case"):
            raise ModelLoadError(f"{settings}: do_lower_case=True is not supported")
        positions = config.max_position_embeddings
        longest = min(positions, read.count("max_seq_length", default=positions))
        config = replace(config, max_position_embeddings=longest)
    if not safetensors.is_file(modules):
        return config
    steps = safetensors.read_json(modules, list)
    if not all(isinstance(step, dict) for step in steps):
        raise ModelLoadError(f"{modules}: not a JSON list of objects")
    names = [str(step.get("type")).rpartition(".")[2] for step in steps]
    if names not in _STEPS:
        raise ModelLoadError(f"{modules}: {shown(names)} is not supported (supported: {_STEPS})")
    pooling_type = _read_pooling(config.path, steps[1].get("path"), modules)
    pooled = replace(encoder, pooling_type=pooling_type, normalize="Normalize" in names)
    return replace(config, encoder=pooled)


def _read_pooling(folder: Path, name: Any, modules: Path) -> PoolingType:
    # A plain name, so that it cannot point out of the folder.
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise ModelLoadError(f"{modules}: bad folder name {shown(name)}")
    path = folder / name / "config.json"
    read = FieldReader(safetensors.read_json(path), str(path))
    modes = [key for key in read.config if key.startswith("pooling_mode_") and read.flag(key)]
    mode = read.config.get("pooling_mode") or (modes[0] if len(modes) == 1 else modes)
    if not isinstance(mode, str) or mode not in _POOLING:
        raise ModelLoadError(f"{path}: pooling by {shown(mode)} is not supported")
    return _POOLING[mode]
