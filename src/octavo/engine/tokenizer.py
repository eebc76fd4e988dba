"""Text to token ids and back, from a GGUF file or a folder with tokenizer.json.

Owns the meaning of a token as bytes: decoding is the UTF-8 text of the tokens' bytes joined, so
that a stream of tokens can be decoded exactly and in linear time. Knows no request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from octavo.engine.gguf_tokenizer import build_bpe
from octavo.errors import ModelLoadError
from octavo.weights.gguf import GGUFFile

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with what an engine needs to know about it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens_map: Mapping[str, str] | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens_map = dict(special_tokens_map or {})
        """bos_token, eos_token, unk_token, pad_token as text, those that exist."""
        self.chat_template = chat_template
        """Jinja source, or None."""
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._add_bos = add_bos and self.bos_token_id is not None
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """Largest token id plus one."""
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level, self._strip_first_space = _decoding_kind(backend)
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """From the metadata of a GGUF file."""
        meta = GGUFFile(Path(path)).metadata
        backend = build_bpe(meta, str(path))
        named = {}
        for name, key in zip(_NAMED, ("bos", "eos", "unknown", "padding"), strict=True):
            token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
            token = backend.id_to_token(token_id) if token_id is not None else None
            if token is not None:
                named[name] = token
        # Without the key, llama.cpp starts every Llama 3 text with BOS.
        default_bos = meta.get("tokenizer.ggml.pre") == "llama-bpe"
        return cls(
            backend,
            special_tokens_map=named,
            add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", default_bos)),
            chat_template=meta.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja."""
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelLoadError(f"no tokenizer: looked for {file}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as exc:  # the library raises bare Exception for malformed files
            raise ModelLoadError(f"{file}: {exc}") from exc
        config = _read_json(folder / "tokenizer_config.json")
        saved = {**_read_json(folder / "special_tokens_map.json"), **config}
        named = {name: token for name in _NAMED if (token := _token_text(saved.get(name)))}
        jinja = folder / "chat_template.jinja"
        template = jinja.read_text("utf-8") if jinja.is_file() else config.get("chat_template")
        return cls(
            backend,
            special_tokens_map=named,
            add_bos=config.get("add_bos_token") is True,
            chat_template=_default_template(template),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS first where the model wants it and not twice."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        text = data.decode("utf-8", "replace")
        return text[1:] if self._strip_first_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text inside a longer sequence; b"" for unknown ids."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, or None."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self.backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which skip_special_tokens removes from the text."""
        return token_id in self.special_token_ids

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = self._byte_of_char
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return token.encode("utf-8")  # an added token with characters outside the byte alphabet
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode("utf-8")

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        """GPT-2's alphabet: printable bytes stand for themselves, the others for 256, 257, ..."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a .gguf file, a folder with tokenizer.json, or that file itself."""
    path = Path(path)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(path)
    return Tokenizer.from_folder(path.parent if path.name == "tokenizer.json" else path)


def _decoding_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens spell bytes (GPT-2) or pieces with '▁' (SentencePiece), and the space rule."""
    decoder = backend.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return True, False
    if kinds & {"Replace", "Metaspace"} and kinds <= {
        "Replace",
        "Metaspace",
        "ByteFallback",
        "Fuse",
        "Strip",
    }:
        never = any(step.get("prepend_scheme") == "never" for step in steps)
        return False, bool(kinds & {"Strip", "Metaspace"}) and not never
    raise ModelLoadError(f"tokenizer.json: decoder {state or None} is not supported")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as exc:
        raise ModelLoadError(f"{path}: {exc}") from exc
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path}: not an object")
    return data


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _default_template(value: Any) -> str | None:
    if isinstance(value, list):  # several named templates
        value = next((t.get("template") for t in value if t.get("name") == "default"), None)
    return value if isinstance(value, str) else None
