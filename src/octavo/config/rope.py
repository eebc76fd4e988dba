"""Rotary embedding as a config asks for it: each kind's parameters, checked, in either spelling.

Older checkpoints write `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`. What
does not depend on tensors is settled here; `layers/rotary.py` makes frequencies of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.config.fields import FieldReader
from octavo.errors import ModelLoadError, shown

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

# What a section may say. Any other key asks for arithmetic that we do not have.
_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "attention_factor"),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor"),
    "finetuned",  # whether the weights were trained with the scaling; changes no arithmetic
}
_PHI3 = "Phi3ForCausalLM"
_PHI3_ORIGINAL_CONTEXT = 4096  # where its config does not say, as in transformers


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and scaling kind with its parameters."""

    theta: float
    """dynamic: already enlarged, for the longest context that `factor` allows."""
    kind: str = "default"
    """One of ROPE_KINDS."""
    factor: float = 1.0
    """All but default: how much longer the context is than the one trained on."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor are left alone."""
    original_max_position_embeddings: int = 8192
    """dynamic, llama3, yarn, longrope: context of the first training."""
    frequency_divisors: tuple[float, ...] = ()
    """Divides each frequency. longrope: short_factor or long_factor. It is also how a GGUF file
    spells llama3 (tensor rope_freqs.weight)."""
    partial_rotary_factor: float = 1.0
    """The part of each head that is rotated; see `rotary_dim`."""
    attention_factor: float = 1.0
    """yarn, longrope: multiplies cos and sin, hence scores by its square."""
    beta_fast: float = 32.0
    """yarn: waves that turn more often than this in the original context are left alone."""
    beta_slow: float = 1.0
    """yarn: waves that turn less often than this are stretched fully."""
    truncate: bool = True
    """yarn: whether the borders between those waves are rounded outwards to whole pairs."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: divisors for a context up to the original one, and beyond it."""

    def rotary_dim(self, head_dim: int) -> int:
        """Leading dimensions of each head that are rotated; the rest pass through."""
        return int(head_dim * self.partial_rotary_factor)

    def context(self, declared: int) -> int:
        """The longest context, for a config whose max_position_embeddings is `declared`.

        dynamic and yarn configs often declare the original context; the factor extends it.
        """
        if self.kind not in ("dynamic", "yarn"):
            return declared
        return max(declared, int(self.original_max_position_embeddings * self.factor))

    def for_context(self, max_model_len: int) -> RopeConfig:
        """longrope: the factors for an engine whose requests have at most that many tokens.

        One set for all requests and positions, as in vLLM: transformers changes to the long factors
        when a text outgrows the original context, which would turn K that is already cached wrong.
        """
        if self.kind != "longrope":
            return self
        long = max_model_len > self.original_max_position_embeddings
        return replace(self, frequency_divisors=self.long_factor if long else self.short_factor)


def read_rope(
    config: Mapping[str, Any], read: FieldReader, architecture: str, head_dim: int, declared: int
) -> RopeConfig:
    """The rope of a config.json whose max_position_embeddings is `declared`.

    Raises ModelLoadError for a kind or a key that we do not build, ConfigError for a bad value.
    """
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise read.error(key, f"{shown(section)} is not an object")
    inner = FieldReader(section, f"{read.where}: {key}")
    kind = _kind(inner, key, read, architecture)
    for name, value in section.items():
        if name not in _KEYS and value is not None:
            raise ModelLoadError(f"{inner.where}: {shown(name)}={shown(value)} is not supported")
    theta = inner.number("rope_theta", default=read.number("rope_theta", default=10000.0))
    partial = _partial_rotary_factor(inner, read, architecture, head_dim)
    rope = RopeConfig(theta, kind, partial_rotary_factor=partial)
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, factor=inner.number("factor"))
    if kind == "dynamic":
        return _dynamic(rope, inner, head_dim, declared)
    # Phi-3 writes it beside the section, which then counts, as in transformers.
    key = "original_max_position_embeddings"
    outer = read if config.get(key) is not None else inner
    default = _PHI3_ORIGINAL_CONTEXT if architecture == _PHI3 else declared
    rope = replace(rope, original_max_position_embeddings=outer.count(key, default=default))
    if kind == "llama3":
        return _llama3(rope, inner)
    if kind == "yarn":
        return _yarn(rope, inner, declared)
    return _longrope(rope, inner, declared, rope.rotary_dim(head_dim) // 2)


def _kind(inner: FieldReader, key: str, read: FieldReader, architecture: str) -> str:
    names = ("rope_type", "type")
    kind, legacy = (_renamed(inner.config.get(name), architecture) for name in names)
    if kind is not None and legacy is not None and kind != legacy:
        raise read.error(key, f"rope_type={shown(kind)} and type={shown(legacy)} disagree")
    kind = kind or legacy or ("default" if "factor" not in inner.config else None)
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        supported = f"not supported (supported: {', '.join(ROPE_KINDS)})"
        raise ModelLoadError(f"{read.where}: {key}: kind {shown(kind)} is {supported}")
    return kind


def _renamed(kind: Any, architecture: str) -> Any:
    """The first Phi-3 files say "su" or "yarn" where they mean longrope."""
    is_old = kind == "su" or (kind == "yarn" and architecture == _PHI3)
    return "longrope" if is_old else kind


def _partial_rotary_factor(
    inner: FieldReader, read: FieldReader, architecture: str, head_dim: int
) -> float:
    key = "partial_rotary_factor"
    partial = inner.number(key, default=read.number(key, default=1.0))
    if partial != 1.0 and architecture != _PHI3:
        raise ModelLoadError(f"{read.where}: {key}={partial} is not supported for {architecture}")
    size = int(head_dim * min(partial, 2.0))
    if partial > 1.0 or size < 2 or size % 2:
        raise read.error(key, f"{partial} of head_dim={head_dim} is no even number within it")
    return partial


def _dynamic(rope: RopeConfig, inner: FieldReader, head_dim: int, declared: int) -> RopeConfig:
    """NTK scaling for the longest context, whatever the text.

    transformers enlarges the base with the longest text that it has seen so far: frequencies, hence
    results, would depend on batch and history. As in vLLM they are fixed here for declared x factor
    positions, so short texts differ from transformers'.
    """
    factor, dim = inner.number("factor", least=1.0), rope.rotary_dim(head_dim)
    if dim < 4:
        raise inner.error("rope_type", f"dynamic needs a head_dim of 4 or more, not {dim}")
    rope = replace(rope, factor=factor, original_max_position_embeddings=declared)
    growth = factor * rope.context(declared) / declared - (factor - 1)
    theta = rope.theta * growth ** (dim / (dim - 2))
    return replace(rope, theta=inner.checked("factor", theta))


def _llama3(rope: RopeConfig, inner: FieldReader) -> RopeConfig:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise inner.error("low_freq_factor", f"{low} must be below high_freq_factor={high}")
    factor = inner.number("factor")
    return replace(rope, factor=factor, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: RopeConfig, inner: FieldReader, declared: int) -> RopeConfig:
    longer = max(1.0, declared / rope.original_max_position_embeddings)
    factor = inner.number("factor", default=longer, least=1.0)
    fast = inner.number("beta_fast", rope.beta_fast)
    slow = inner.number("beta_slow", rope.beta_slow)
    if fast < slow:
        raise inner.error("beta_fast", f"{fast} is below beta_slow={slow}")
    if rope.theta <= 1.0:
        raise inner.error("rope_theta", f"{rope.theta} is not above 1, which yarn needs")
    growth, named = 0.1 * math.log(factor), ("mscale", "mscale_all_dim")
    attention = growth + 1.0
    if all(inner.config.get(key) is not None for key in named):
        above, below = (inner.number(key) for key in named)
        attention = (above * growth + 1.0) / (below * growth + 1.0)
    rope = replace(rope, factor=factor, beta_fast=fast, beta_slow=slow)
    attention = inner.number("attention_factor", default=attention)
    return replace(rope, attention_factor=attention, truncate=inner.flag("truncate", default=True))


def _longrope(rope: RopeConfig, inner: FieldReader, declared: int, pairs: int) -> RopeConfig:
    original = rope.original_max_position_embeddings
    factor = inner.number("factor", default=declared / original)
    if original < 2:
        raise inner.error("original_max_position_embeddings", f"{original} is below 2")
    attention = math.sqrt(1.0 + math.log(max(factor, 1.0)) / math.log(original))
    return replace(
        rope,
        factor=factor,
        attention_factor=inner.number("attention_factor", default=attention),
        short_factor=inner.numbers("short_factor", pairs),
        long_factor=inner.numbers("long_factor", pairs),
    ).for_context(declared)
