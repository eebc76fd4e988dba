"""Builds a `tokenizers` byte-level BPE from the metadata of a GGUF file.

Owns which GGUF vocabularies and pre-tokenizers are supported. The splits are those of the models'
own tokenizer.json files, so ids equal what the models were trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.config.fields import shown
from octavo.errors import ModelLoadError

_T = TypeVar("_T")
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SUPPORTED_PRE = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm")


def build_bpe(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer described by `tokenizer.ggml.*`; `source` names the file in errors."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelLoadError(
            f"{source}: tokenizer.ggml.model is {shown(kind)}; only byte-level BPE ('gpt2') can be read "
            "from GGUF. Give a folder with the model's tokenizer.json as `tokenizer`."
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SUPPORTED_PRE:
        raise ModelLoadError(
            f"{source}: tokenizer.ggml.pre {shown(pre)} is not supported "
            f"(supported: {', '.join(SUPPORTED_PRE)}). Give a folder with the model's "
            "tokenizer.json as `tokenizer`."
        )
    tokens = _texts(metadata, "tokens", source)
    vocab = {token: i for i, token in enumerate(tokens)}
    for i, token in enumerate(tokens):
        if vocab[token] != i:
            raise ModelLoadError(
                f"{source}: tokenizer.ggml.tokens: {shown(token)} is there twice, as {i} and "
                f"{vocab[token]}"
            )
    merges: list[tuple[str, str]] = []
    for merge in _texts(metadata, "merges", source):
        left, space, right = merge.partition(" ")
        if not space:
            raise ModelLoadError(f"{source}: tokenizer.ggml.merges: {shown(merge)} is no pair")
        merges.append((left, right))
    types = metadata.get("tokenizer.ggml.token_type") or []
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise ModelLoadError(
            f"{source}: tokenizer.ggml.token_type: {shown(types)} is not one number for each of "
            f"{len(tokens)} tokens"
        )
    model = call_library(
        f"{source}: tokenizer.ggml.merges",
        lambda: models.BPE(
            vocab=vocab,
            merges=merges,
            # Llama 3 has whole words in its vocabulary that no merge reaches.
            ignore_merges=pre == "llama-bpe",
        ),
    )
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [tokens[i] for i, token_type in enumerate(types) if token_type == wanted]
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t in chosen])
    return tokenizer


def call_library(where: str, build: Callable[[], _T]) -> _T:
    """The result of `build`; what the tokenizers library makes of bad data is a ModelLoadError."""
    try:
        return build()
    except Exception as exc:  # the library raises bare Exception
        raise ModelLoadError(f"{where}: {exc}") from exc
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # Rust's panics are no Exception
            raise
        raise ModelLoadError(f"{where}: the tokenizers library failed: {exc}") from exc


def _texts(metadata: Mapping[str, Any], name: str, source: str) -> Sequence[str]:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise ModelLoadError(f"{source}: no {key} in the metadata")
    values = metadata[key]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelLoadError(f"{source}: {key}: {shown(values)} is not a list of texts")
    return values


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    digits = r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}"
    split = Regex(f"{_CONTRACTIONS}|{_WORDS}|{digits}|{_REST}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
