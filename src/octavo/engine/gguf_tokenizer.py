"""Builds a `tokenizers` byte-level BPE from the metadata of a GGUF file.

Owns which GGUF vocabularies and pre-tokenizers are supported. The splits are those of the models'
own tokenizer.json files, so ids equal what the models were trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.errors import ModelLoadError

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
            f"{source}: tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') can be read "
            "from GGUF. Give a folder with the model's tokenizer.json as `tokenizer`."
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SUPPORTED_PRE:
        raise ModelLoadError(
            f"{source}: tokenizer.ggml.pre {pre!r} is not supported "
            f"(supported: {', '.join(SUPPORTED_PRE)}). Give a folder with the model's "
            "tokenizer.json as `tokenizer`."
        )
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    except KeyError as exc:
        raise ModelLoadError(f"{source}: no {exc.args[0]} in the metadata") from None
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            # Llama 3 has whole words in its vocabulary that no merge reaches.
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or []
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [tokens[i] for i, token_type in enumerate(types) if token_type == wanted]
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t in chosen])
    return tokenizer


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
