"""How a sentence-transformers folder pools, normalises and limits texts: the files beside config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.config.encoder import PoolingType
from octavo.config.fields import FieldReader
from octavo.config.model import ModelConfig
from octavo.errors import ModelLoadError, shown
from octavo.weights.safetensors import is_file, parse_json, read_json

# As each version of the library spells it.
_POOLING: dict[Any, PoolingType] = {"mean": "mean", "cls": "cls"}
_POOLING |= {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_STEPS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def with_pooling(config: ModelConfig) -> ModelConfig:
    """An embedding model's config with what its folder says; without such files as it is.

    Raises ModelLoadError for steps that we do not build, ConfigError for a bad field.
    """
    encoder = config.encoder
    assert encoder is not None
    settings, modules = config.path / "sentence_bert_config.json", config.path / "modules.json"
    if is_file(settings):
        read = FieldReader(read_json(settings), str(settings))
        if read.flag("do_lower_case"):
            raise ModelLoadError(f"{settings}: do_lower_case=True is not supported")
        positions = config.max_position_embeddings
        longest = min(positions, read.count("max_seq_length", default=positions))
        config = replace(config, max_position_embeddings=longest)
    if not is_file(modules):
        return config
    steps = parse_json(modules)
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
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
    read = FieldReader(read_json(path), str(path))
    modes = [key for key in read.config if key.startswith("pooling_mode_") and read.flag(key)]
    mode = read.config.get("pooling_mode") or (modes[0] if len(modes) == 1 else modes)
    if not isinstance(mode, str) or mode not in _POOLING:
        raise ModelLoadError(f"{path}: pooling by {shown(mode)} is not supported")
    return _POOLING[mode]
