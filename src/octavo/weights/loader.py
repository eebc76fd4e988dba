"""From a model's name to a model with weights, each parameter element counted as filled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from octavo.attention.base import AttentionBackend
from octavo.config.model import ModelConfig
from octavo.errors import ModelLoadError
from octavo.models import registry
from octavo.models.decoder import DecoderModel, WeightTarget
from octavo.weights import dummy, gguf, hub, safetensors

_SHOWN = 8
# Tensors that some checkpoints carry and that the config already says.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


def read_model_config(
    model: str,
    revision: str | None = None,
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
) -> ModelConfig:
    """Find the model (folder, .gguf file or Hugging Face id) and read what it is; no weights yet.

    Raises ModelLoadError if it is not there or not supported, ConfigError for a bad field.
    """
    path = hub.resolve_model_path(model, revision)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelLoadError(f"{path}: found no config.json, and {len(files)} .gguf files")
        path = files[0]
    if path.suffix == ".gguf":
        if load_format == "safetensors":
            raise ModelLoadError(f"{path}: load_format is safetensors, but this is a GGUF file")
        kind: Literal["gguf", "dummy"] = "dummy" if load_format == "dummy" else "gguf"
        return gguf.read_config(gguf.GGUFFile(path), kind, dtype)
    if load_format == "gguf":
        raise ModelLoadError(f"{path}: load_format is gguf, but this is a folder with config.json")
    config = _read_json(path / "config.json")
    if load_format != "dummy" and not (config.get("dtype") or config.get("torch_dtype")):
        config["dtype"] = safetensors.stored_dtype(path)
    result = ModelConfig.from_hf(
        config, path, "dummy" if load_format == "dummy" else "safetensors", dtype
    )
    return replace(result, eos_token_ids=_merge_eos(result, path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: unreadable ({error})") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return content


def _merge_eos(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    """Chat models often name their end-of-turn token in generation_config.json only."""
    path = folder / "generation_config.json"
    extra = _read_json(path).get("eos_token_id") if path.exists() else None
    ids = extra if isinstance(extra, list) else [] if extra is None else [extra]
    return tuple(dict.fromkeys((*config.eos_token_ids, *ids)))


def load_model(
    config: ModelConfig, backend: AttentionBackend, device: torch.device, seed: int = 0
) -> DecoderModel:
    """Build the model, fill and pack its weights. `seed` matters for load_format dummy only."""
    model = registry.build_model(config, backend, device)
    load_weights(model, config, seed)
    model.finalize()
    return model


def load_weights(model: DecoderModel, config: ModelConfig, seed: int = 0) -> None:
    """Stream the checkpoint into the model's parameters, converting to its dtype.

    Raises ModelLoadError naming tensors that are missing, unexpected, doubled, of the wrong shape
    or not floating point, and parameters left partly unfilled.
    """
    targets = registry.weight_map(config)
    fill(model, targets, _checkpoint(config, targets, seed), str(config.path))


def _checkpoint(
    config: ModelConfig, targets: Mapping[str, WeightTarget], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    if config.load_format == "dummy":
        return dummy.iterate_tensors(targets, seed)
    if config.load_format == "gguf":
        return gguf.iterate_tensors(gguf.GGUFFile(config.path), config)
    return _without_tied_head(safetensors.iterate_tensors(config.path), config)


def _without_tied_head(
    tensors: Iterator[tuple[str, torch.Tensor]], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Some checkpoints store the tied lm_head again, and derived rotary tables."""
    for name, tensor in tensors:
        tied_head = name == "lm_head.weight" and config.tie_word_embeddings
        if not tied_head and not name.endswith(_DERIVED_SUFFIXES):
            yield name, tensor


def fill(
    model: torch.nn.Module,
    targets: Mapping[str, WeightTarget],
    tensors: Iterable[tuple[str, torch.Tensor]],
    where: str,
) -> None:
    """Copy each named tensor to its place; see `load_weights`. `where` opens each error."""
    parameters = dict(model.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    waiting = dict(targets)
    extra: list[str] = []
    for name, tensor in tensors:
        target = waiting.pop(name, None)
        if target is None:
            if name in targets:
                raise ModelLoadError(f"{where}: {name} appears twice")
            extra.append(name)
            continue
        if tuple(tensor.shape) != target.shape:
            raise ModelLoadError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, expected {target.shape}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelLoadError(f"{where}: {name} has dtype {tensor.dtype}, expected a float")
        rows = slice(target.start, target.start + target.shape[0])
        parameters[target.parameter].data[rows].copy_(tensor)
        filled[target.parameter] += tensor.numel()
    if waiting:
        raise ModelLoadError(f"{where}: missing tensors: {_names(waiting)}")
    if extra:
        raise ModelLoadError(f"{where}: unexpected tensors: {_names(extra)}")
    partial = [name for name, count in filled.items() if count != parameters[name].numel()]
    if partial:
        raise ModelLoadError(f"{where}: parameters left partly unfilled: {_names(partial)}")


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
