"""Embedding models on the GPU: near the CPU's vectors, and the same bits in every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cpu.tiny.encoders import write_encoder

from octavo import LLM

# bf16 against fp32, two layers of random weights, vectors of length 1.
LEAST_COSINE = 0.999
LENS = (1, 2, 3, 8, 16, 17, 33, 64, 5, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (size,), generator=generator).tolist() for size in LENS]


def vectors(llm: LLM, batch: list[list[int]], pooling_type: str = "mean") -> torch.Tensor:
    outputs = llm.embed(batch, pooling_type=pooling_type, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_vectors_are_near_the_cpus_and_the_same_bits_in_any_batch(folder: Path, dtype: str) -> None:
    with LLM(folder, device="cuda", dtype=dtype) as llm, LLM(folder, device="cpu") as cpu:
        for kind in ("mean", "cls"):
            together = vectors(llm, texts(), kind)
            cosines = (together * vectors(cpu, texts(), kind)).sum(1)
            assert float(cosines.min()) > LEAST_COSINE
            alone = torch.cat([vectors(llm, [text], kind) for text in texts()])
            assert torch.equal(together, alone)
            assert torch.equal(vectors(llm, texts()[::-1] * 30, kind), alone.flip(0).repeat(30, 1))


def test_float32_weights_run_as_bfloat16_and_small_steps_change_no_bit(folder: Path) -> None:
    with LLM(folder, device="cuda") as llm:
        assert llm.get_tokenizer() is not None
        expected = vectors(llm, texts())
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 3}
    with LLM(folder, device="cuda", dtype="bfloat16", **limits) as llm:
        assert torch.equal(vectors(llm, texts()), expected)
