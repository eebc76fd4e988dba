"""Damaged tokenizer files: ModelLoadError naming the file and the key, at once."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models

from octavo.engine.gguf_tokenizer import build_tokenizer
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import InvalidRequestError, ModelLoadError
from tests.cpu.engine.helpers import BYTE_CHARS, SPECIALS, byte_tokenizer

HUGE = 10**400


def save(folder, name="tokenizer_config.json", **config) -> None:
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / name).write_text(json.dumps(config))


def bpe(vocab) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.parametrize("last", [None, 2**24, 2**31, 2**32 - 1])
def test_a_vocabulary_without_tokens_or_with_absurd_ids_is_refused(tmp_path, last):
    # Edited as text: the library itself counts through all ids when it writes them.
    path = tmp_path / "tokenizer.json"
    bpe({}).save(str(path))
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {} if last is None else {"a": 0, "b": last}
    path.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="a vocabulary of"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "unk_token", "pad_token"])
@pytest.mark.parametrize("value", [5, ["a"], {"content": 7}, {}, False, {"content": None}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_of_the_wrong_kind_are_named(tmp_path, file, name, value):
    save(tmp_path, file, **{name: value})
    with pytest.raises(ModelLoadError, match=f"{file}: {name}"):
        load_tokenizer(tmp_path)


def test_special_tokens_outside_the_vocabulary_are_refused(tmp_path):
    """Not so unk_token, pad_token and an unused bos_token: templates print them, nothing more."""
    save(tmp_path, eos_token="</s>")
    with pytest.raises(ModelLoadError, match="eos_token '</s>' is not in the vocabulary"):
        load_tokenizer(tmp_path)
    save(tmp_path, bos_token="<s>", add_bos_token=True)
    with pytest.raises(ModelLoadError, match="bos_token '<s>' is not in the vocabulary"):
        load_tokenizer(tmp_path)
    save(tmp_path, bos_token="<s>", pad_token="<p>", unk_token=None, eos_token="")
    loaded = load_tokenizer(tmp_path)
    assert loaded.special_tokens_map == {"bos_token": "<s>", "pad_token": "<p>"}


@pytest.mark.parametrize(
    "template", [[1, 2], 5, {"default": 3}, [{"name": "default", "template": 1}], [{}], True]
)
def test_a_chat_template_of_the_wrong_kind_is_named(tmp_path, template):
    save(tmp_path, chat_template=template)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template"):
        load_tokenizer(tmp_path)


def test_unreadable_files_are_named(tmp_path):
    save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: unreadable"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for content in ("[" * 100_000, "[]", "\xff"):
        (tmp_path / "tokenizer_config.json").write_text(content, "latin-1")
        with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)
    save(tmp_path, add_bos_token="yes")
    with pytest.raises(ModelLoadError, match="add_bos_token: 'yes' is not true or false"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["/no/such.gguf", "/no/such", "/" + "x" * 300, "a\0b", "x.gguf/y"])
def test_a_missing_tokenizer_says_what_was_looked_for(name):
    with pytest.raises(ModelLoadError, match="looked for "):
        load_tokenizer(name)


def test_a_tokenizer_json_never_cuts_or_fills_up_a_prompt(tmp_path):
    backend = byte_tokenizer().backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("abcd") == [*b"abcd"]


def test_tokens_that_only_look_like_bytes_are_text():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<0xZZ>": 0, "<0x41>": 1}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    assert Tokenizer(backend).decode([0, 1]) == "<0xZZ>A"


def test_a_text_that_the_vocabulary_cannot_spell_is_the_requests_error():
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={"a": 0}))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a") == [0]
    for text in ("b", "\ud800"):
        with pytest.raises(InvalidRequestError, match="prompt: cannot be made into tokens"):
            tokenizer.encode(text)


GOOD = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*BYTE_CHARS.values(), *SPECIALS],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.token_type": [1] * 256 + [3] * 3,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", 5),
        ("tokens", "abc"),
        ("tokens", [1, 2]),
        ("merges", 5),
        ("merges", [["a", "b"]]),
        ("merges", ["ab"]),
        ("merges", ["a b"]),  # "ab" is no token
        ("merges", ["no such"]),
        ("token_type", 5),
        ("token_type", "abc"),
        ("token_type", [3] * 300),
        ("pre", ["gpt-2"]),
        ("pre", HUGE),
        ("model", ["gpt2"]),
    ],
)
def test_damaged_gguf_vocabularies_are_named(key, value):
    build_tokenizer(GOOD, "x.gguf")
    with pytest.raises(ModelLoadError, match=rf"x\.gguf: tokenizer\.ggml\.{key}"):
        build_tokenizer({**GOOD, f"tokenizer.ggml.{key}": value}, "x.gguf")


@pytest.mark.parametrize("key", ["ggml.eos_token_id", "ggml.add_bos_token", "chat_template"])
@pytest.mark.parametrize("value", [-1, 2**40, 259, [1], 1.5])
def test_damaged_gguf_settings_are_named(monkeypatch, key, value):
    class Fake:
        def __init__(self, path) -> None:
            self.metadata = {**GOOD, f"tokenizer.{key}": value}

    monkeypatch.setattr("octavo.engine.tokenizer.opened", Fake)
    with pytest.raises(ModelLoadError, match=rf"x\.gguf: tokenizer\.{key}"):
        load_tokenizer("x.gguf")


def test_a_token_that_is_there_twice_is_named():
    """Only one of its ids could be encoded, and the other would decode to nothing."""
    tokens = [*GOOD["tokenizer.ggml.tokens"], "twice", "twice"]
    types = {"tokenizer.ggml.token_type": [1] * len(tokens)}
    with pytest.raises(ModelLoadError, match=r"x\.gguf: tokenizer\.ggml\.tokens: 'twice'"):
        build_tokenizer({**GOOD, **types, "tokenizer.ggml.tokens": tokens}, "x.gguf")


def test_a_folder_may_be_called_gguf(tmp_path):
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    save(folder)
    assert load_tokenizer(folder).encode("a")
