"""Builds a `tokenizers` tokenizer from the metadata of a GGUF file.

Owns which GGUF vocabularies and pre-tokenizers are supported: byte-level BPE ("gpt2") and
SentencePiece ("llama"). The splits are those of the models' own tokenizer.json files, so ids equal
what the models were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.errors import ModelLoadError, shown

_T = TypeVar("_T")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
# A capitalised or lower-case word, then one with capitals first: both end where the case turns.
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (f"{_LEAD}{_UPPER}*{_LOWER}+", f"{_LEAD}{_UPPER}+{_LOWER}*")
_CASED_CONTRACTED = (f"{word}{_CONTRACTIONS}?" for word in _CASED)
_DEEPSEEK_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK_WORDS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"


class _Pre(NamedTuple):
    """How a family of byte-level BPE models prepares a text."""

    splits: tuple[str, ...]
    """Applied in turn; each match is a piece. None: GPT-2's own expression."""
    gpt2: bool = False
    """GPT-2's expression after `splits`."""
    nfc: bool = False
    whole_words: bool = False
    """Words in the vocabulary that no merge reaches; such models start with BOS by default."""


_LLAMA3 = _Pre((f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}",), whole_words=True)
_QWEN2 = _Pre((f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}",), nfc=True)
_TEKKEN = _Pre(("|".join((*_CASED, r"\p{N}", _REST_SLASH)),), whole_words=True)
_GPT4O = _Pre(("|".join((*_CASED_CONTRACTED, r"\p{N}{1,3}", _REST_SLASH)),))
_DEEPSEEK_CODER = _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_DEEPSEEK_REST = rf"{_DEEPSEEK_MARKS}|{_DEEPSEEK_WORDS}|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = _Pre((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_REST))
_PRE = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt", "trillion"), _Pre((), gpt2=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "minerva-7b"), _Pre((r"\p{N}",), gpt2=True)
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA3._replace(whole_words=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "stablelm2": _QWEN2._replace(nfc=False),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
}
SUPPORTED_PRE = tuple(_PRE)


_ELSE = "Give a folder with the model's tokenizer.json as `tokenizer`."


class _Metadata(NamedTuple):
    """`tokenizer.ggml.*` of a file; every complaint names the file and the key."""

    values: Mapping[str, Any]
    source: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(f"tokenizer.ggml.{name}", default)

    def error(self, name: str, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: tokenizer.ggml.{name}{text}")

    def texts(self, name: str) -> list[str]:
        values = self.get(name)
        if values is None:
            raise ModelLoadError(f"{self.source}: no tokenizer.ggml.{name} in the metadata")
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.error(name, f": {shown(values)} is not a list of texts")
        return values

    def one_each(self, name: str, number: int) -> list[Any]:
        """A list of so many values; empty if it is not there."""
        values = self.get(name) or []
        if not isinstance(values, list) or len(values) not in (0, number):
            text = f": {shown(values)} is not one number for each of {number} tokens"
            raise self.error(name, text)
        return values

    def bpe(self, name: str, **given: Any) -> Tokenizer:
        """A tokenizer of this model; `name` is the key to blame."""
        where = f"{self.source}: tokenizer.ggml.{name}"
        return call_library(where, lambda: Tokenizer(models.BPE(**given)))


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer described by `tokenizer.ggml.*`; `source` names the file in errors."""
    meta = _Metadata(metadata, source)
    kind = meta.get("model")
    if kind not in ("gpt2", "llama"):
        text = "(supported: 'gpt2', a byte-level BPE, and 'llama', SentencePiece)"
        raise meta.error("model", f" {shown(kind)} is not supported {text}. {_ELSE}")
    tokens = meta.texts("tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    for i, token in enumerate(tokens):
        if vocab[token] != i:
            text = f": {shown(token)} is there twice, as {i} and {vocab[token]}"
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
    meta = _Metadata(metadata, "")
    pre = meta.get("pre", "default")
    known = _PRE.get(pre) if isinstance(pre, str) else None
    return meta.get("model") == "llama" or (known is not None and known.whole_words)


def _byte_level(meta: _Metadata, vocab: dict[str, int]) -> Tokenizer:
    pre = meta.get("pre", "default")
    if not isinstance(pre, str) or pre not in _PRE:
        supported = f"(supported: {', '.join(SUPPORTED_PRE)})"
        raise meta.error("pre", f" {shown(pre)} is not supported {supported}. {_ELSE}")
    family = _PRE[pre]
    merges: list[tuple[str, str]] = []
    for merge in meta.texts("merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise meta.error("merges", f": {shown(merge)} is no pair")
        merges.append((left, right))
    tokenizer = meta.bpe("merges", vocab=vocab, merges=merges, ignore_merges=family.whole_words)
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in family.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.gpt2),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: _Metadata, vocab: dict[str, int], types: Sequence[Any]) -> Tokenizer:
    """SentencePiece's BPE: two neighbours merge where their sum is a piece, the best score first."""
    scores = meta.one_each("scores", len(vocab))
    if not scores or not all(isinstance(one, float) and math.isfinite(one) for one in scores):
        text = f": {shown(scores)} is not one finite number for each of {len(vocab)} tokens"
        raise meta.error("scores", text)
    pieces = [token for token, i in vocab.items() if types[i] == _NORMAL and len(token) > 1]
    pieces.sort(key=lambda piece: -scores[vocab[piece]])
    merges = [pair for piece in pieces for pair in _splits(piece, vocab)]
    if not isinstance(prefix := meta.get("add_space_prefix", True), bool):
        raise meta.error("add_space_prefix", f": {shown(prefix)} is not true or false")
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
