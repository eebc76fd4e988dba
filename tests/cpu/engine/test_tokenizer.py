"""Token ids equal transformers'; decoding equals the tokenizers library's."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo.engine.gguf_tokenizer import SUPPORTED_PRE, build_tokenizer
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import ModelLoadError
from tests.cpu.engine.helpers import BYTE_CHARS, SPECIALS, byte_tokenizer, spell

TEXTS = [
    "The capital of France is Paris.",
    "def f(x):\n    return x ** 2  # don't\n\n\n\tprint(f(12345))",
    "a  12   345 6\u00a07 ١٢٣ ½ Ⅷ",
    "  leading and trailing  ",
    "Příliš žluťoučký kůň; 안녕하세요 세계; 日本語; 👨‍👩‍👧🏳️‍🌈",
    "I'll we've DON'T it's 'quoted'",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "",
    " ",
    "\r\n\r\n \t \u2028 x",
]


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers(smollm2, reference_tokenizer, text):
    ids = smollm2.encode(text)
    assert ids == reference_tokenizer(text)["input_ids"]
    for skip in (True, False):
        assert smollm2.decode(ids, skip) == reference_tokenizer.decode(
            ids, skip_special_tokens=skip
        )


@given(st.text(max_size=60) | st.text(alphabet="ab1 \n'٣é,.<|>", max_size=40))
def test_smollm2_ids_equal_transformers_on_any_text(smollm2, reference_tokenizer, text):
    ids = smollm2.encode(text)
    assert ids == reference_tokenizer(text)["input_ids"]
    assert smollm2.decode(ids, False) == reference_tokenizer.decode(ids, skip_special_tokens=False)


@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_smollm2_decode_equals_the_library_on_any_ids(smollm2, ids, skip):
    assert smollm2.decode(ids, skip) == smollm2.backend.decode(ids, skip_special_tokens=skip)


def test_smollm2_facts(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id) == (49152, 1, 2)
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.backend.token_to_id("<|im_end|>") == 2
    assert smollm2.encode("a")[0] != 1, "add_bos_token is false in the file"
    assert smollm2.chat_template.startswith("{% for message in messages %}")


def test_unknown_ids_have_no_text(smollm2):
    assert smollm2.token_bytes(49152) == smollm2.token_bytes(-1) == b""


def _metadata(pre: str, **more) -> dict:
    tokens = [*BYTE_CHARS.values(), "<|x|>", "user"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4],
        **more,
    }


@pytest.mark.parametrize("pre", SUPPORTED_PRE)
@given(text=st.text(max_size=30))
def test_each_pre_tokenizer_round_trips(pre, text):
    tokenizer = build_tokenizer(_metadata(pre), "x.gguf")
    expected = normalizers.NFC().normalize_str(text) if tokenizer.normalizer else text
    decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    assert decoded == expected


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll pay  1234€", ["I", "'ll", " pay", " ", " 1234", "€"]),
        ("smollm", "pay  1234", ["pay", "  ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'LL pay 12345\n\n x", ["I", "'LL", " pay", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "pay 123 (x)", ["pay", " ", "1", "2", "3", " (", "x", ")"]),
    ],
)
def test_pre_tokenizers_split_as_published(pre, text, pieces):
    tokenizer = build_tokenizer(_metadata(pre), "x.gguf")
    found = [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    tokenizer = Tokenizer(build_tokenizer(_metadata("gpt-2"), "x.gguf"))
    assert tokenizer.encode("<|x|>user") == [256, 257]
    assert tokenizer.decode([256, 257]) == "user"
    assert 256 in tokenizer.special_token_ids


def test_unsupported_gguf_tokenizers_are_refused_with_the_supported_list():
    with pytest.raises(ModelLoadError, match=r"'bloom' is not supported.*smollm.*llama-bpe"):
        build_tokenizer(_metadata("bloom"), "x.gguf")
    with pytest.raises(ModelLoadError, match=r"x\.gguf.*'t5' is not supported.*tokenizer\.json"):
        build_tokenizer(_metadata("gpt-2", **{"tokenizer.ggml.model": "t5"}), "x.gguf")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.merges: missing"):
        build_tokenizer(
            {k: v for k, v in _metadata("gpt-2").items() if "merges" not in k}, "x.gguf"
        )


def _save(folder, backend, **config) -> None:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_folder_gives_the_same_tokenizer(tmp_path, smollm2):
    _save(
        tmp_path,
        smollm2.backend,
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>", "special": True},
        chat_template="{{ messages }}",
    )
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("Ahoj, světe 12") == smollm2.encode("Ahoj, světe 12")
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.vocab_size) == (1, 2, 49152)
    assert loaded.special_token_ids == smollm2.special_token_ids
    assert loaded.chat_template == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("the file wins")
    assert load_tokenizer(tmp_path / "tokenizer.json").chat_template == "the file wins"


def test_a_folder_saved_by_transformers(tmp_path, smollm2, reference_tokenizer):
    reference_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert loaded.encode(text) == reference_tokenizer(text)["input_ids"]
    assert loaded.special_token_ids == frozenset(reference_tokenizer.all_special_ids) | (
        smollm2.special_token_ids
    )
    assert loaded.chat_template == reference_tokenizer.chat_template
    assert loaded.special_tokens_map == smollm2.special_tokens_map


def test_bos_is_added_once(tmp_path):
    backend = byte_tokenizer().backend
    bos = backend.token_to_id(SPECIALS[0])
    _save(tmp_path, backend, bos_token=SPECIALS[0], add_bos_token=True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a") == [bos, 97]
    assert tokenizer.encode(SPECIALS[0] + "a") == [bos, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], bos)]
    )
    _save(tmp_path, backend, bos_token=SPECIALS[0], add_bos_token=True)
    assert load_tokenizer(tmp_path).encode("a") == [bos, 97]


def test_named_templates_use_the_default_one(tmp_path):
    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    _save(tmp_path, byte_tokenizer().backend, chat_template=templates)
    assert load_tokenizer(tmp_path).chat_template == "d"


def test_a_missing_or_broken_tokenizer_says_where(tmp_path):
    with pytest.raises(ModelLoadError, match=r"looked for .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ModelLoadError, match=r"x\.gguf"):
        load_tokenizer(tmp_path / "x.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def _sentencepiece_like() -> Tokenizer:
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    for piece in ("▁", "▁Hello", "▁world", "ab", "é"):
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, special_tokens_map={"eos_token": "</s>"})


@given(st.data())
def test_byte_fallback_decodes_like_the_library(data):
    """Valid texts only: for a run of bytes that is partly invalid the library drops all of it."""
    tokenizer = _sentencepiece_like()
    part = st.integers(256, 261).map(lambda i: [i]) | st.text(min_size=1, max_size=3).map(
        lambda t: list(t.encode())
    )
    ids = [i for ids in data.draw(st.lists(part, max_size=10)) for i in ids]
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_byte_fallback_keeps_the_valid_part_of_a_run():
    tokenizer = _sentencepiece_like()
    assert tokenizer.decode([*"é".encode(), 0xFF]) == "é\ufffd"
    assert tokenizer.decode([257, 258]) == "Hello world"


def test_a_decoder_that_is_not_understood_is_refused():
    backend = byte_tokenizer().backend
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelLoadError, match="CTC"):
        Tokenizer(backend)


def test_word_pieces_are_joined_and_a_cut_text_keeps_its_special_tokens():
    words = ["[CLS]", "[SEP]", "[UNK]", "read", "##er", "##s", "it"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer = Tokenizer(backend)
    text = "readers read it"
    ids = tokenizer.encode(text)
    assert ids == [0, 3, 4, 5, 3, 6, 1]
    assert tokenizer.decode(ids[1:-1]) == text == backend.decode(ids[1:-1])
    assert tokenizer.num_special_tokens == 2
    assert tokenizer.encode_cut(text, 4) == [0, 3, 4, 1]
    assert tokenizer.encode_cut(text, 7) == ids == tokenizer.encode(text)


def test_an_added_token_outside_the_byte_alphabet_decodes_to_itself():
    backend = byte_tokenizer().backend
    backend.add_tokens([AddedToken("two words 한", normalized=False)])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("xtwo words 한y")
    assert tokenizer.decode(ids) == "xtwo words 한y" == backend.decode(ids)
    assert spell(b"a b") == "aĠb"
