"""From what a user calls a model to its ModelConfig: finds it and reads what it is, no weights yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.config.engine import EngineArgs
from octavo.config.fields import token_ids
from octavo.config.model import LoadFormat, ModelConfig
from octavo.errors import ConfigError, InvalidRequestError, ModelLoadError
from octavo.sampling_params import MODEL_DEFAULTS, SamplingParams
from octavo.weights import gguf, hub, safetensors
from octavo.weights.sentence_transformers import with_pooling


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
        return gguf.read_config(gguf.GGUFFile(path), kind, dtype)
    if load_format == "gguf":
        raise ModelLoadError(f"{path}: load_format is gguf, but this is a folder with config.json")
    config = safetensors.read_json(path / "config.json")
    if load_format != "dummy" and not (config.get("dtype") or config.get("torch_dtype")):
        config["dtype"] = safetensors.stored_dtype(path)
    kind = "dummy" if load_format == "dummy" else "safetensors"
    result = ModelConfig.from_hf(config, path, kind, dtype)
    if result.encoder is not None:
        return with_pooling(result)
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
