"""Text to token ids and back, from a GGUF file or a folder with tokenizer.json.

Owns the meaning of a token as bytes: decoding is the UTF-8 text of the tokens' bytes joined, so
that a stream of tokens can be decoded exactly and in linear time. Knows no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from octavo.config.fields import FieldReader
from octavo.engine.gguf_tokenizer import build_tokenizer, call_library, starts_with_bos
from octavo.errors import InvalidRequestError, ModelLoadError, shown
from octavo.weights.gguf import opened
from octavo.weights.safetensors import is_file, read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_VOCAB = 2**24  # far above any real one; ids beyond it are damage
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A `tokenizers.Tokenizer` with what an engine needs to know about it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens_map: Mapping[str, str] | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        """`source` names the file in errors.

        Raises ModelLoadError for a vocabulary that cannot be used, and for an eos_token, or a
        bos_token that is to be added, that is not in it.
        """
        self.backend = backend
        self.special_tokens_map = dict(special_tokens_map or {})
        """bos_token, eos_token, unk_token, pad_token as text, those that exist."""
        self.chat_template = chat_template
        """Jinja source, or None."""
        ids = {name: backend.token_to_id(text) for name, text in self.special_tokens_map.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        for name in ("eos_token", "bos_token") if add_bos else ("eos_token",):
            if name in ids and ids[name] is None:
                text = shown(self.special_tokens_map[name])
                raise ModelLoadError(f"{source}: {name} {text} is not in the vocabulary")
        self._add_bos = add_bos and self.bos_token_id is not None
        # A file may ask to cut or fill up texts for training; a prompt is taken as it is.
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """Largest token id plus one."""
        if not 0 < self.vocab_size <= _MAX_VOCAB:
            raise ModelLoadError(
                f"{source}: a vocabulary of {self.vocab_size} ids (supported: 1 to {_MAX_VOCAB})"
            )
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level, self._strip_first_space, self._continues = _decoding_kind(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """From the metadata of a GGUF file."""
        meta = opened(Path(path)).metadata
        backend = build_tokenizer(meta, str(path))
        named = {}
        for name, short in zip(_NAMED, ("bos", "eos", "unknown", "padding"), strict=True):
            key = f"tokenizer.ggml.{short}_token_id"
            if (token_id := meta.get(key)) is not None:
                is_id = type(token_id) is int and 0 <= token_id < _MAX_VOCAB
                if not is_id or (token := backend.id_to_token(token_id)) is None:
                    raise ModelLoadError(f"{path}: {key}: {shown(token_id)} is no token's id")
                named[name] = token
        key, read = "tokenizer.chat_template", FieldReader(meta, str(path), ModelLoadError)
        return cls(
            backend,
            special_tokens_map=named,
            add_bos=read.flag("tokenizer.ggml.add_bos_token", starts_with_bos(meta)),
            chat_template=_default_template(meta.get(key), f"{path}: {key}"),
            source=str(path),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja."""
        folder = Path(folder)
        file, settings_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not is_file(file):
            raise ModelLoadError(f"no tokenizer: looked for {shown(str(file.absolute()))}")
        backend = call_library(str(file), lambda: tokenizers.Tokenizer.from_file(str(file)))
        config: dict[str, Any] = {}
        named: dict[str, str] = {}
        for source in (folder / "special_tokens_map.json", settings_file):  # the second wins
            config = read_json(source) if is_file(source) else {}
            for name in _NAMED:
                if name in config:
                    named.pop(name, None)
                    if text := _token_text(config[name], f"{source}: {name}"):
                        named[name] = text
        template, where = config.get("chat_template"), f"{settings_file}: chat_template"
        if is_file(jinja := folder / "chat_template.jinja"):  # wins
            try:
                template, where = jinja.read_text("utf-8"), str(jinja)
            except (OSError, UnicodeDecodeError) as exc:
                raise ModelLoadError(f"{jinja}: unreadable ({exc})") from exc
        return cls(
            backend,
            special_tokens_map=named,
            add_bos=FieldReader(config, str(settings_file), ModelLoadError).flag("add_bos_token"),
            chat_template=_default_template(template, where),
            source=str(folder),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS first where the model wants it and not twice.

        Raises InvalidRequestError for a text that this vocabulary cannot spell.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as exc:  # the library raises bare Exception
            raise InvalidRequestError("prompt", f"cannot be made into tokens: {exc}") from exc
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
        if (known := self._bytes.get(token_id)) is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def encode_cut(self, text: str, max_length: int) -> list[int]:
        """Like `encode`, but of a text cut at its end so that so many ids are left, special ones kept.

        max_length: more than `num_special_tokens`.
        """
        if len(ids := self.encode(text)) <= max_length:
            return ids
        encoding = self.backend.encode(text, add_special_tokens=False)
        encoding.truncate(max_length - self.num_special_tokens)
        return list(self.backend.post_process(encoding).ids)

    @property
    def num_special_tokens(self) -> int:
        """Tokens that `encode` adds to a text's own, but for a BOS of `add_bos`."""
        return int(self.backend.num_special_tokens_to_add(False))

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = self._byte_of_char
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return token.encode("utf-8")  # an added token with characters outside the byte alphabet
        if self._continues:
            begins = not token.startswith(self._continues)
            return (" " + token if begins else token.removeprefix(self._continues)).encode("utf-8")
        if _BYTE.fullmatch(token):
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
    if path.suffix == ".gguf" and not path.is_dir():
        return Tokenizer.from_gguf(path)
    return Tokenizer.from_folder(path.parent if path.name == "tokenizer.json" else path)


def _decoding_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool, str]:
    """Whether tokens spell bytes (GPT-2) or pieces (SentencePiece, WordPiece), whether a text's first
    space is dropped, and what marks a piece that continues a word (WordPiece; else empty)."""
    decoder = backend.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return True, False, ""
    spaced = {"Replace", "Metaspace"}
    if kinds & spaced and kinds <= spaced | {"ByteFallback", "Fuse", "Strip"}:
        never = any(step.get("prepend_scheme") == "never" for step in steps)
        return False, bool(kinds & {"Strip", "Metaspace"}) and not never, ""
    if kinds == {"WordPiece"} and (prefix := state.get("prefix")):
        return False, True, str(prefix)
    raise ModelLoadError(f"tokenizer.json: decoder {state or None} is not supported")


def _token_text(value: Any, where: str) -> str | None:
    """A special token: text, an object with `content`, or null."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) and value is not None:
        raise ModelLoadError(f"{where}: {shown(value)} is not a token")
    return text


def _default_template(value: Any, where: str) -> str | None:
    """Jinja source, the one named default of several (an object, or a list of name and template)"""
    if isinstance(value, list) and all(isinstance(one, dict) and "name" in one for one in value):
        named = [one for one in value if one["name"] == "default"]
        value = named[0].get("template") if named else None
    elif isinstance(value, dict):
        value = value.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(f"{where}: {shown(value)} is not text or a list of named templates")
    return value
