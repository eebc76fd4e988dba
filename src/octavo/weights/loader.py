"""Fills a model with a checkpoint's tensors; each parameter element is counted as filled."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from octavo.attention.groups import ModelBackend
from octavo.config import machine
from octavo.config.engine import LinearBackend
from octavo.config.model import ModelConfig
from octavo.errors import ModelLoadError
from octavo.layers.linear import Linear
from octavo.models import registry
from octavo.models.bert import BertEncoder
from octavo.models.decoder import DecoderModel, WeightTarget
from octavo.weights import gguf, safetensors
from octavo.weights.safetensors import listed
from octavo.weights.upload import FileUpload

# Tensors that some checkpoints carry: what the config already says, and layers that are not used.
_UNUSED_SUFFIXES = (
    *(".rotary_emb.inv_freq", "embeddings.position_ids"),
    *("pooler.dense.weight", "pooler.dense.bias"),
)


def load_model(
    config: ModelConfig,
    backend: ModelBackend,
    device: torch.device,
    seed: int = 0,
    linear_backend: LinearBackend = "tiled",
) -> DecoderModel:
    """Build the model, fill and pack its weights. `seed` matters for load_format dummy only.

    Before anything is built, the shapes that the config asks for are compared with the
    checkpoint's, and the bytes with the device's free memory; ModelLoadError names what does not
    fit.
    """
    _check(config, device)
    model = registry.build_model(config, backend, device)
    load_weights(model, config, seed)
    model.finalize(linear_backend)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading took for a while is not the model's
    return model


def load_encoder(
    config: ModelConfig,
    device: torch.device,
    seed: int = 0,
    linear_backend: LinearBackend = "tiled",
) -> BertEncoder:
    """`load_model` for an embedding model. Tensors that are not finite are refused, too."""
    _check(config, device)
    model = BertEncoder(config, device)
    load_weights(model, config, seed)
    parameters = dict(model.named_parameters())

    def is_finite(place: WeightTarget) -> bool:
        return bool(parameters[place.parameter][place.rows].isfinite().all())

    places = registry.weight_map(config)
    if bad := [name for name, place in places.items() if not is_finite(place)]:
        raise ModelLoadError(f"{config.path}: not finite in {config.dtype}: {listed(bad)}")
    model.finalize(linear_backend)
    return model


def _check(config: ModelConfig, device: torch.device) -> None:
    _check_names(config)
    is_decoder = config.encoder is None
    # While the rotary tables are made, the angles stand beside cos and sin, fp32 each.
    rotary = 3 * config.max_position_embeddings * (config.head_dim // 2) * 4
    rotary *= is_decoder + (config.local_rope is not None)
    weights = config.weight_bytes()
    on_gpu = device.type == "cuda"
    if is_decoder and config.tie_word_embeddings and not on_gpu:  # lm_head packs a copy of its own
        weights += config.vocab_size * config.hidden_size * config.dtype_bytes
    available = torch.cuda.mem_get_info(device)[0] if on_gpu else machine.available_memory()
    if weights + rotary > available:
        raise ModelLoadError(
            f"{config.path}: the model takes {weights + rotary} bytes ({weights} of weights, {rotary}"
            f" of rotary tables for max_position_embeddings={config.max_position_embeddings}), and "
            f"{available} bytes of memory are available"
        )


def _check_names(config: ModelConfig) -> None:
    """Reads headers only, so that a wrong config cannot ask for more than the files hold."""
    if config.load_format == "dummy":
        return
    held: Iterable[tuple[str, Any]] = _stored(config)  # memory-mapped: no data is read
    if config.load_format == "gguf":
        held = ((one.name, one) for one in gguf.weights(gguf.opened(config.path)))
    for _ in _matched(registry.weight_map(config), held, str(config.path)):
        pass


def _matched(
    targets: Mapping[str, WeightTarget], held: Iterable[tuple[str, Any]], where: str
) -> Iterator[tuple[str, Any, WeightTarget]]:
    """Each of `held`, which have shapes, with its place. Raises ModelLoadError unless all match."""
    waiting = dict(targets)
    extra: list[str] = []
    for name, one in held:
        target = waiting.pop(name, None)
        if target is None:
            if name in targets:
                raise ModelLoadError(f"{where}: {name} appears twice")
            extra.append(name)
            continue
        if tuple(one.shape) != target.shape:
            shape = tuple(one.shape)
            raise ModelLoadError(f"{where}: {name} has shape {shape}, expected {target.shape}")
        yield name, one, target
    if waiting:
        raise ModelLoadError(f"{where}: missing tensors: {listed(waiting)}")
    if extra:
        raise ModelLoadError(f"{where}: unexpected tensors: {listed(extra)}")


def load_weights(model: DecoderModel | BertEncoder, config: ModelConfig, seed: int = 0) -> None:
    """Stream the checkpoint into the model's parameters, converting to its dtype.

    Raises ModelLoadError naming tensors that are missing, unexpected, doubled, of the wrong shape
    or not floating point, and parameters left partly unfilled.
    """
    targets, where = registry.weight_map(config), str(config.path)
    weight = model.embed_tokens.weight
    if config.load_format == "dummy":
        on_gpu = (weight.device, weight.dtype) if weight.is_cuda else ()
        fill(model, targets, random_tensors(targets, seed, *on_gpu), where)
    elif config.load_format == "gguf":
        assert isinstance(model, DecoderModel)
        file, head = gguf.opened(config.path), model.lm_head
        packed = _keep_blocks(model, targets, file)
        fill(model, targets | packed, gguf.iterate_tensors(file, config, packed), where)
        if config.tie_word_embeddings:  # the embedding has elements in any case: it looks up rows
            table = "token_embd.weight"
            head.weight = model.embed_tokens.weight
            if head.keep_blocks(file.tensors[table].type.name):
                head.get_parameter("weight").data = file.tensor(table, packed=True)
        gguf.kept.cache_clear()
    elif weight.is_cuda:
        ranges = safetensors.file_ranges(config.path)
        with FileUpload(weight.device) as upload:

            def start(name: str, tensor: torch.Tensor, place: torch.Tensor) -> None:
                upload.start(ranges[name], tensor.dtype, place)

            fill(model, targets, _stored(config), where, start)
    else:
        fill(model, targets, _stored(config), where)


def _keep_blocks(
    model: DecoderModel, targets: Mapping[str, WeightTarget], file: gguf.GGUFFile
) -> dict[str, WeightTarget]:
    """Has linears keep blocks if all their parts are of one type; the targets of those, in bytes."""
    types = {one.name: file.tensors[one.stored].type.name for one in gguf.weights(file)}
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for name, place in targets.items():
        kinds[place.parameter].add(types.get(name, ""))
    sizes = {
        f"{name}.weight": module.keep_blocks("+".join(kinds[f"{name}.weight"]))
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    }
    kept = {name: place for name, place in targets.items() if sizes.get(place.parameter)}
    return {n: replace(t, shape=(t.shape[0], sizes[t.parameter])) for n, t in kept.items()}


def _stored(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors folder but for a tied lm_head and what is not used."""
    for name, tensor in safetensors.iterate_tensors(config.path):
        tied_head = name == "lm_head.weight" and config.tie_word_embeddings
        if not tied_head and not name.endswith(_UNUSED_SUFFIXES):
            yield name, tensor


def random_tensors(
    targets: Mapping[str, WeightTarget],
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights for benchmarks and tests: on one device a tensor depends on its name and the seed only.

    CPU and GPU (and GPUs of different models) have different generators, hence different values. They
    are in (-1e-3, 1e-3), as vLLM's, and never zeros: data changes a GPU's clock, and zeros hide errors.
    """
    for name, target in targets.items():
        # torch's CPU generator takes 32 bits of the seed, so both go into one hash.
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        empty = torch.empty(target.shape, dtype=dtype, device=device)
        yield name, empty.uniform_(-1e-3, 1e-3, generator=generator)


def fill(
    model: torch.nn.Module,
    targets: Mapping[str, WeightTarget],
    tensors: Iterable[tuple[str, torch.Tensor]],
    where: str,
    copy: Callable[[str, torch.Tensor, torch.Tensor], object] = lambda _, one, to: to.copy_(one),
) -> None:
    """Copy each named tensor to its place; see `load_weights`. `where` opens each error.

    copy(name, tensor, place) may finish later: what is checked here needs shape and dtype only.
    """
    parameters = dict(model.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    for name, tensor, target in _matched(targets, tensors, where):
        place = parameters[target.parameter].data[target.rows]
        is_float = tensor.is_floating_point() and tensor.element_size() > 1
        if not is_float and place.dtype != torch.uint8:  # of blocks
            raise ModelLoadError(f"{where}: {name} has dtype {tensor.dtype}, expected a float")
        copy(name, tensor, place)
        filled[target.parameter] += tensor.numel()
    partial = [name for name, count in filled.items() if count != parameters[name].numel()]
    if partial:
        raise ModelLoadError(f"{where}: parameters left partly unfilled: {listed(partial)}")
