"""Tokenizers shared by the tests of the engine's front half."""

from __future__ import annotations

import pytest
from hypothesis import settings

from octavo.engine.tokenizer import Tokenizer, load_tokenizer

settings.register_profile("shared-machine", deadline=None)  # time says nothing on a busy machine
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> Tokenizer:
    """SmolLM2's tokenizer out of its GGUF file."""
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def reference_tokenizer(smollm2_path):
    """transformers' tokenizer of the same file.

    transformers drops tokenizer.ggml.pre; the digit split that SmolLM2 was trained with (its
    tokenizer.json, and llama.cpp's `smollm`) is put back, so that runs of spaces before a digit
    agree too.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return reference
