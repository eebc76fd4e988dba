"""A byte-level tokenizer made on the spot, and small builders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from octavo.config.model import ModelConfig
from octavo.config.rope import RopeConfig
from octavo.engine.tokenizer import Tokenizer

BYTE_CHARS = {
    **{b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))},
    **{
        b: chr(256 + i)
        for i, b in enumerate(
            b for b in range(256) if not (33 <= b < 127 or 161 <= b < 173 or b >= 174)
        )
    },
}
SPECIALS = ("<|bos|>", "<|end|>", "<|tool|>")


def spell(data: bytes) -> str:
    """Bytes in GPT-2's alphabet."""
    return "".join(BYTE_CHARS[b] for b in data)


def byte_tokenizer(words: Sequence[str] = (), chat_template: str | None = None) -> Tokenizer:
    """Ids 0-255 are the bytes; then `words`, which merges reach where possible; then SPECIALS."""
    vocab = {spell(bytes([b])): b for b in range(256)}
    merges = []
    for word in words:
        piece = spell(word.encode())
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocab:
                vocab[piece[:end]] = len(vocab)
                merges.append((piece[: end - 1], piece[end - 1]))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return Tokenizer(
        backend,
        special_tokens_map={"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]},
        chat_template=chat_template,
    )


def token(tokenizer: Tokenizer, text: str) -> int:
    """The one token that spells `text`."""
    token_id = tokenizer.backend.token_to_id(spell(text.encode()))
    assert token_id is not None
    return token_id


def engine_config(
    vocab_size: int,
    *,
    max_model_len: int = 64,
    eos_token_ids: tuple[int, ...] = (),
    max_logprobs: int = 20,
    seed: int = 0,
    policy: Literal["fcfs", "priority"] = "fcfs",
) -> EngineConfig:
    """Settings of an engine whose model is never loaded."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        path=Path("nowhere"),
        load_format="dummy",
        dtype="float32",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        max_position_embeddings=max_model_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=eos_token_ids,
    )
    return EngineConfig(
        model=model,
        cache=CacheConfig(16, True, 0.9, None, None),
        scheduler=SchedulerConfig(8, 64, max_model_len, policy=policy),
        device="cpu",
        seed=seed,
        max_logprobs=max_logprobs,
        linear_backend="tiled",
        enforce_eager=False,
    )
