"""Builds a `tokenizers` tokenizer from the metadata of a GGUF file.

Owns which GGUF vocabularies and pre-tokenizers are supported: byte-level BPE ("gpt2") and
SentencePiece ("llama"). The splits, in pretokenizers.toml, are those of the models' own tokenizer.json
files, so ids equal what the models were trained with.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.config.fields import FieldReader
from octavo.errors import ModelLoadError, OctavoError, shown

_T = TypeVar("_T")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type

_FILE = tomllib.loads(Path(__file__).with_name("pretokenizers.toml").read_text("utf-8"))
_PRE: dict[str, dict[str, Any]] = {name: one for one in _FILE["family"] for name in one["names"]}
SUPPORTED_PRE = tuple(_PRE)
_ELSE = "Give a folder with the model's tokenizer.json as `tokenizer`."


class _Metadata(FieldReader):
    """`tokenizer.ggml.*` of a file; every complaint names the file and the key."""

    def error(self, key: str, text: str) -> OctavoError:
        return ModelLoadError(f"{self.where}: tokenizer.ggml.{key}: {text}")

    def texts(self, key: str) -> list[str]:
        values = self.get(key)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.error(key, f"{shown(values)} is not a list of texts")
        return values

    def one_each(self, key: str, number: int) -> list[Any]:
        """A list of so many values; empty if it is not there."""
        values = self.get(key, [])
        if not isinstance(values, list) or len(values) not in (0, number):
            text = f"{shown(values)} is not one number for each of {number} tokens"
            raise self.error(key, text)
        return values

    def bpe(self, key: str, **given: Any) -> Tokenizer:
        """A tokenizer of this model; `key` is the one to blame."""
        where = f"{self.where}: tokenizer.ggml.{key}"
        return call_library(where, lambda: Tokenizer(models.BPE(**given)))


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer described by `tokenizer.ggml.*`; `source` names the file in errors."""
    prefix = "tokenizer.ggml."
    meta = _Metadata({key.removeprefix(prefix): value for key, value in metadata.items()}, source)
    kind = meta.config.get("model")
    if kind not in ("gpt2", "llama"):
        text = "(supported: 'gpt2', a byte-level BPE, and 'llama', SentencePiece)"
        raise meta.error("model", f"{shown(kind)} is not supported {text}. {_ELSE}")
    tokens = meta.texts("tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    for i, token in enumerate(tokens):
        if vocab[token] != i:
            text = f"{shown(token)} is there twice, as {i} and {vocab[token]}"
            raise meta.error("tokens", text)
    types = meta.one_each("token_type", len(tokens)) or [_NORMAL] * len(tokens)
    if kind == "llama":
        tokenizer = _sentencepiece(meta, vocab, types)
    else:
        tokenizer = _byte_level(meta, vocab)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [tokens[i] for i, token_type in enumerate(types) if token_type == wanted]
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t in chosen])
    return tokenizer


def starts_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts start with BOS where the file does not say, as in llama.cpp."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    family = _PRE.get(pre, {}) if isinstance(pre, str) else {}
    return metadata.get("tokenizer.ggml.model") == "llama" or bool(family.get("whole_words"))


def _byte_level(meta: _Metadata, vocab: dict[str, int]) -> Tokenizer:
    pre = meta.get("pre", "default")
    if not isinstance(pre, str) or pre not in _PRE:
        supported = f"(supported: {', '.join(SUPPORTED_PRE)})"
        raise meta.error("pre", f"{shown(pre)} is not supported {supported}. {_ELSE}")
    family = _PRE[pre]
    merges: list[tuple[str, str]] = []
    for merge in meta.texts("merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise meta.error("merges", f"{shown(merge)} is no pair")
        merges.append((left, right))
    whole_words = family.get("whole_words", False)
    tokenizer = meta.bpe("merges", vocab=vocab, merges=merges, ignore_merges=whole_words)
    if family.get("nfc"):
        tokenizer.normalizer = normalizers.NFC()
    splits = (Regex(one.replace("\n", "")) for one in family["splits"])
    steps = [pre_tokenizers.Split(one, behavior="isolated") for one in splits]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.get("gpt2", False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: _Metadata, vocab: dict[str, int], types: Sequence[Any]) -> Tokenizer:
    """SentencePiece's BPE: two neighbours merge where their sum is a piece, the best score first."""
    scores = meta.one_each("scores", len(vocab))
    if not scores or not all(isinstance(one, float) and math.isfinite(one) for one in scores):
        text = f"{shown(scores)} is not one finite number for each of {len(vocab)} tokens"
        raise meta.error("scores", text)
    pieces = [token for token, i in vocab.items() if types[i] == _NORMAL and len(token) > 1]
    pieces.sort(key=lambda piece: -scores[vocab[piece]])
    merges = [pair for piece in pieces for pair in _splits(piece, vocab)]
    prefix = meta.flag("add_space_prefix", True)
    tokenizer = meta.bpe("tokens", vocab=vocab, merges=merges, byte_fallback=True)
    spaces = normalizers.Replace(" ", "▁")
    # As llama.cpp: also after each special token, but a text without letters stays empty.
    prepended = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    tokenizer.normalizer = prepended if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _splits(piece: str, vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for cut in range(1, len(piece)):
        if piece[:cut] in vocab and piece[cut:] in vocab:
            yield piece[:cut], piece[cut:]


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
