"""Tokenizers of real models, by way of GGUF metadata, against the models' own: the same ids."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
import tokenizers

from octavo.engine.gguf_tokenizer import build_tokenizer
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from tests.cpu.engine.helpers import spell
from tests.cpu.weights.packages import fetch

ROOT = Path(__file__).resolve().parents[3]
ALPHABET = [
    *"abcXYZ é中あ한0123456789.,!?'\"()/\\_-\n\r\t",
    "the ",
    "I'll",
    "DON'T",
    "\u00a0",
    "🙂",
]
ALPHABET += ["👩\u200d👧", "е\u0301", "ΩΣ", "ǅ", "½", "٣", "  ", "\n\n", "    ", "camelCase"]


def texts(count: int = 400) -> list[str]:
    """Prose and code of this repository, and random mixtures of what splits differ in."""
    chooser = random.Random(0)
    mixed = ["".join(chooser.choices(ALPHABET, k=chooser.randint(1, 40))) for _ in range(count)]
    sources = [(ROOT / name).read_text() for name in ("README.md", "src/octavo/llm.py")]
    pieces = [text[at : at + 400] for text in sources for at in range(0, len(text), 400)]
    return ["", " ", *pieces, *mixed]


def as_gguf(file: Path, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter would write of a byte-level BPE's tokenizer.json."""
    content = json.loads(file.read_text("utf-8"))
    ids = content["model"]["vocab"] | {one["content"]: one["id"] for one in content["added_tokens"]}
    control = {one["content"] for one in content["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    merges = content["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
    }


@pytest.mark.parametrize(
    ("name", "pre"), [("llama3.json", "llama-bpe"), ("deepseek-v3.json", "deepseek-v3")]
)
def test_byte_level_ids_equal_the_models_own_file(name: str, pre: str) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(fetch(name)))
    ours = Tokenizer(build_tokenizer(as_gguf(fetch(name), pre), name))
    for text in texts():
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, False) == text


def test_tekken_ids_equal_a_merge_by_ranks() -> None:
    """Mistral's own file has byte strings by rank, and its expression; no merges, no tokenizer.json."""
    content = json.loads(fetch("nemo-ranks.json").read_text("utf-8"))
    size = content["config"]["default_vocab_size"]
    size -= content["config"]["default_num_special_tokens"]
    words = [base64.b64decode(one["token_bytes"]) for one in content["vocab"][:size]]
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = [
        f"{spell(word[:cut])} {spell(word[cut:])}"
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in ranks and word[cut:] in ranks
    ]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": [spell(word) for word in words],
        "tokenizer.ggml.merges": merges,
    }
    ours = Tokenizer(build_tokenizer(metadata, "nemo-ranks.json"))
    split = regex.compile(content["config"]["pattern"])

    def merged(piece: bytes) -> list[int]:
        parts = [bytes([byte]) for byte in piece]
        while len(parts) > 1:
            found = [ranks.get(a + b, size) for a, b in pairwise(parts)]
            if (best := min(found)) == size:
                break
            at = found.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ranks[part] for part in parts]

    for text in texts():
        pieces = [match.group().encode() for match in split.finditer(text)]
        expected = [i for p in pieces for i in ([ranks[p]] if p in ranks else merged(p))]
        assert ours.encode(text) == expected, text


def test_sentencepiece_ids_and_texts_equal_the_library() -> None:
    """Mistral 7B's first vocabulary: byte fallback, and a space put before the text."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(fetch("mistral.model")))
    size = library.vocab_size()
    kinds = {0: 2} | {i: 3 for i in range(size) if library.is_control(i)}
    kinds |= {i: 6 for i in range(size) if library.is_byte(i)}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [library.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(i, 1) for i in range(size)],
    }
    ours = Tokenizer(
        build_tokenizer(metadata, "mistral.model"),
        special_tokens_map={"bos_token": "<s>"},
        add_bos=True,
    )
    for text in texts():
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == library.encode(text), text
        assert ours.decode(ids) == library.decode(ids) == text
    assert ours.encode("<s>hi") == ours.encode("hi") == [1, *library.encode("hi")]
    bare = build_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False}, "x.gguf")
    assert bare.encode("hi").tokens == ["hi"]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b.gguf", "gemma-3-270m.gguf"])
def test_ids_of_whole_gguf_files_equal_transformers(name: str) -> None:
    """transformers converts the metadata by code of its own."""
    from transformers import AutoTokenizer

    path = fetch(name)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_tokenizer(path)
    for text in texts():
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, False) == text
