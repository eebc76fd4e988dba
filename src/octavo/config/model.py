"""What a model is, as numbers: the only place that reads a config, in the words of Hugging Face.

Everything the other layers know about an architecture comes from a `ModelConfig`; a key that is
missing, malformed or asks for something we do not build is refused here, by name. What families differ
in is in families.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from octavo.config import gemma
from octavo.config.encoder import ENCODERS, EncoderConfig, read_encoder
from octavo.config.fields import FieldReader, token_ids
from octavo.config.kv_cache import KVCacheSpec
from octavo.config.moe import MoEConfig, read_moe
from octavo.config.rope import RopeConfig, read_rope
from octavo.errors import ConfigError, ModelLoadError, shown

DType = Literal["float32", "bfloat16", "float16"]
LoadFormat = Literal["safetensors", "gguf", "dummy"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))
_FAMILIES = {name: family for family in _TABLE["family"] for name in family["names"]}
ARCHITECTURES = tuple(_FAMILIES)

# Far above any real model, so that a damaged config is refused and not tried.
MAX_LAYERS = 4096
MAX_CONTEXT = 2**24
MAX_HEADS, MAX_HEAD_DIM = 512, 1024


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a model, complete: nothing else is read from the checkpoint's config."""

    architecture: str
    """Hugging Face class name, e.g. LlamaForCausalLM."""
    path: Path
    """Folder or .gguf file with the weights."""
    load_format: LoadFormat
    dtype: DType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    """The longest context; see `RopeConfig.context`."""
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Ids that end a text; those beyond the vocabulary were left out (see `token_ids`)."""
    sampling_defaults: tuple[tuple[str, float], ...] = ()
    """Sampling parameters, by name, of requests that bring none."""
    attention_bias: bool = False
    """Biases on q, k and v."""
    attention_out_bias: bool = False
    """A bias on o."""
    mlp_bias: bool = False
    """Biases on gate, up and down."""
    qk_norm: bool = False
    """An RMS norm over each head of q and of k, before the rotary embedding."""
    sliding_window: int | None = None
    """A token sees the keys from its position - sliding_window + 1 on; None: all."""
    global_layers: tuple[int, ...] = ()
    """Layers that see all keys, whatever the window of the others, which are local."""
    local_rope: RopeConfig | None = None
    """Of the local layers; None: `rope`."""
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its square root; None: head_dim."""
    gelu: bool = False
    """The MLP's gate is gelu by its tanh instead of silu."""
    post_norms: bool = False
    """Norms on what attention and MLP add to the residual stream, too."""
    norm_unit_offset: bool = False
    """Norms multiply by 1 + weight, and round after it."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it, rounded to the dtype."""
    moe: MoEConfig | None = None
    """Layers whose MLP is a mixture of experts; None: there are none."""
    encoder: EncoderConfig | None = None
    """Of an embedding model, which has no rope, no gates, no lm_head and no KV cache; else None."""

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], path: Path, load_format: LoadFormat, dtype: str = "auto"
    ) -> ModelConfig:
        """Read a Hugging Face config.json.

        `dtype` auto means the config's own (float32 if it names none). Raises ModelLoadError for an
        architecture or feature we do not build, ConfigError for a missing or bad field.
        """
        architecture = _architecture(config)
        config = {**_FAMILIES[architecture].get("defaults", {}), **config}
        read = FieldReader(config, str(path))
        _refuse_unsupported(read, architecture)
        if architecture in ENCODERS:
            fields = read_encoder(read, architecture)
            return cls(architecture, path, load_format, _dtype(dtype, config), **fields)
        is_gemma = architecture == gemma.GEMMA3
        hidden_size = read.count("hidden_size")
        family: dict[str, Any] = _heads(architecture, hidden_size, read)
        head_dim = family["head_dim"]
        declared = read.count("max_position_embeddings", limit=MAX_CONTEXT)
        family |= _biases(architecture, read)
        if is_gemma:
            rope, family["local_rope"] = gemma.read_ropes(read, head_dim, declared)
        else:
            rope = read_rope(config, read, architecture, head_dim, declared)
        if (context := rope.context(declared)) > MAX_CONTEXT:
            raise read.error("max_position_embeddings", f"{context} is more than {MAX_CONTEXT}")
        vocab_size = read.count("vocab_size")
        bos = token_ids(config.get("bos_token_id"), f"{path}: bos_token_id", vocab_size)
        eos = token_ids(config.get("eos_token_id"), f"{path}: eos_token_id", vocab_size)
        num_layers = read.count("num_hidden_layers", limit=MAX_LAYERS)
        if is_gemma:
            family |= gemma.read_family(read, num_layers, hidden_size)
        return cls(
            architecture=architecture,
            path=path,
            load_format=load_format,
            dtype=_dtype(dtype, config),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=read.count("intermediate_size"),
            num_layers=num_layers,
            rms_norm_eps=read.number("rms_norm_eps"),
            rope=rope,
            max_position_embeddings=context,
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos,
            qk_norm=architecture.startswith(("Qwen3", "Gemma3")),
            sliding_window=_window(architecture, read, context),
            moe=read_moe(read, architecture, num_layers),
            **family,
        )

    def for_context(self, max_model_len: int) -> ModelConfig:
        """The same model in an engine whose requests have at most that many tokens."""
        local = self.local_rope and self.local_rope.for_context(max_model_len)
        return replace(self, rope=self.rope.for_context(max_model_len), local_rope=local)

    def window(self, layer: int) -> int | None:
        """Keys that a token sees in this layer, its own included; None: all up to its own."""
        return None if layer in self.global_layers else self.sliding_window

    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that share a block table, those that see all keys first.

        Layers of a group are alike. There are as many in one as there are of the rarer kind, at most,
        so that a block of any group can have the same bytes.
        """
        local = tuple(one for one in range(self.num_layers) if one not in self.global_layers)
        kinds = [kind for kind in (self.global_layers, local) if kind]
        size = min(map(len, kinds))
        return tuple(kind[i : i + size] for kind in kinds for i in range(0, len(kind), size))

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one weight, and of one number in the KV cache."""
        return DTYPE_BYTES[self.dtype]

    def num_layer_parameters(self, active: bool = False) -> tuple[int, int]:
        """Of all layers, in linears (biases included) and in norms; `active`: those a token meets."""
        hidden, inner, layers = self.hidden_size, self.intermediate_size, self.num_layers
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * hidden * (query + kv)
        attention += self.attention_bias * (query + 2 * kv) + self.attention_out_bias * hidden
        inputs = 2  # matrices that x meets in an MLP: gate and up
        norms = (2 + 2 * self.post_norms) * hidden + self.qk_norm * 2 * self.head_dim
        if self.encoder is not None:
            inputs, norms = 1, 4 * hidden  # its norms have biases
        mlp = (inputs + 1) * hidden * inner + self.mlp_bias * (inputs * inner + hidden)
        linears = layers * (attention + mlp)
        if self.moe is not None:
            num_sparse = layers - len(self.moe.dense_layers)
            linears += num_sparse * (self.moe.num_parameters(hidden, active) - mlp)
        return linears, layers * norms

    def num_parameters(self, active: bool = False) -> int:
        """Distinct parameters: layers, final norm, embedding, and lm_head unless tied to it.

        `active`: of experts only as many as a token uses.
        """
        vocab = self.vocab_size * self.hidden_size
        heads = 1 if self.tie_word_embeddings else 2
        layers = sum(self.num_layer_parameters(active))
        if self.encoder is not None:  # tables of positions and token types, and a norm with a bias
            tables = self.encoder.num_positions + self.encoder.num_token_types
            return layers + vocab + (tables + 2) * self.hidden_size
        return layers + self.hidden_size + heads * vocab

    def weight_bytes(self) -> int:
        """num_parameters x bytes of the dtype."""
        return self.num_parameters() * self.dtype_bytes

    def kv_bytes_per_token(self) -> int:
        """2 (K, V) x num_layers x num_kv_heads x head_dim x bytes of the dtype; 0 for an encoder."""
        if self.encoder is not None:
            return 0
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def flops_per_token(self, context: int) -> int:
        """FLOPs to run one token that attends to `context` keys, logits included.

        2 x (weights that the token meets in all layers + vocab_size x hidden_size)
        + 4 x num_heads x head_dim x (keys that each layer sees of them, added up), Q K^T and P V.
        Norms, rotary embedding, softmax and activations are left out: below 1 %.
        """
        keys = sum(min(context, self.window(one) or context) for one in range(self.num_layers))
        matrices, _ = self.num_layer_parameters(active=True)
        logits = self.vocab_size * self.hidden_size if self.encoder is None else 0
        attention = 4 * self.num_heads * self.head_dim * keys
        return 2 * (matrices + logits) + attention

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Shape of one layer's K/V blocks; all layers are equal."""
        return KVCacheSpec(block_size, self.num_kv_heads, self.head_dim, self.dtype_bytes)


def _refuse_unsupported(read: FieldReader, architecture: str) -> None:
    family = _FAMILIES[architecture]
    harmless = {**_TABLE["harmless"], **family.get("harmless", {})}
    for key in harmless:
        value = read.config.get(key)
        if value is not None and value not in harmless[key] and key not in family.get("read", ()):
            raise ModelLoadError(f"{read.where}: {key}={shown(value)} is not supported")
    kinds = read.config.get("layer_types") or []
    # All layers are alike, but Gemma's.
    kind = "sliding_attention" if _is_windowed(architecture, read) else "full_attention"
    alike = isinstance(kinds, list) and all(one == kind for one in kinds)
    if not alike and architecture != gemma.GEMMA3:
        raise ModelLoadError(f"{read.where}: layer_types={shown(kinds)} is not supported")


def _is_windowed(architecture: str, read: FieldReader) -> bool:
    said = read.config.get("sliding_window") is not None
    return said and _FAMILIES[architecture].get("windowed", False)


def _window(architecture: str, read: FieldReader, context: int) -> int | None:
    """None also for a window that holds the whole context: it hides nothing."""
    window = read.count("sliding_window") if _is_windowed(architecture, read) else context
    return window if window < context else None


def _heads(architecture: str, hidden_size: int, read: FieldReader) -> dict[str, int]:
    """Where a config does not say, heads share hidden_size; transformers' Qwen3 has 128."""
    num_heads = read.count("num_attention_heads", limit=MAX_HEADS)
    num_kv_heads = read.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise read.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    default = hidden_size // num_heads
    if architecture == "Qwen3ForCausalLM":
        default = 128
    elif read.config.get("head_dim") is None and hidden_size % num_heads:
        raise read.error("head_dim", f"missing, and hidden_size/{num_heads} is no integer")
    head_dim = read.count("head_dim", default=default, limit=MAX_HEAD_DIM)
    if head_dim % 2:
        raise read.error("head_dim", f"{head_dim} is odd; rotary embedding needs pairs")
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _biases(architecture: str, read: FieldReader) -> dict[str, bool]:
    """Which linears have biases; what a family's code fixes is not asked of its config."""
    if architecture == "Qwen2ForCausalLM":
        return {"attention_bias": True}
    if architecture == "Qwen2MoeForCausalLM":
        return {"attention_bias": "qkv_bias" not in read.config or read.flag("qkv_bias")}
    if _FAMILIES[architecture].get("windowed"):
        return {}
    attention = read.flag("attention_bias")
    mlp = architecture == "LlamaForCausalLM" and read.flag("mlp_bias")
    return {"attention_bias": attention, "attention_out_bias": attention, "mlp_bias": mlp}


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError("architectures: missing; is this the config.json of a language model?")
    if known := [str(name) for name in names if name in ARCHITECTURES]:
        return known[0]
    supported = ", ".join(ARCHITECTURES)
    raise ModelLoadError(f"architectures={shown(names)} is not supported (supported: {supported})")


def _dtype(asked: str, config: Mapping[str, Any]) -> DType:
    name: Any = asked
    if asked == "auto":
        # transformers 5 writes "dtype", older versions "torch_dtype".
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        raise ConfigError(f"dtype: {shown(name)} is not one of {', '.join(DTYPE_BYTES)}")
    return cast(DType, name)
