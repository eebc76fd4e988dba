"""Random BERT and RoBERTa encoders against transformers, and their bits in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.config.engine import EngineArgs
from octavo.models.bert import BertEncoder, pool
from octavo.weights.checkpoint import load_model_config
from octavo.weights.loader import load_encoder
from octavo.worker.device import initialise_math
from tests.cpu.paged import assert_close, assert_same_bits

FAMILIES = ("Bert", "Roberta", "XLMRoberta")
LENS = [1, 2, 3, 7, 16, 17, 33, 64, 100, 129]
CPU = torch.device("cpu")


def reference(folder: Path, family: str, **changes: Any) -> Any:
    """A random encoder of transformers, saved into the folder, with biases and norms not trivial."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=131,
        hidden_size=60,
        intermediate_size=90,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=140,
        initializer_range=0.2,
        **changes,
    )
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "LayerNorm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: Any = "auto") -> BertEncoder:
    initialise_math()
    return load_encoder(load_model_config(EngineArgs(str(folder), dtype=dtype)), CPU)


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 131, (size,), generator=generator).tolist() for size in LENS]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_hidden_states_and_poolings_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    theirs = reference(tmp_path, family)
    ours = load(tmp_path)
    hidden = ours(texts())
    # Transformers gets the ragged batch padded, as sentence-transformers gives it.
    ids = torch.full((len(LENS), max(LENS)), theirs.config.pad_token_id)
    for row, text in zip(ids, texts(), strict=True):
        row[: len(text)] = torch.tensor(text)
    mask = torch.arange(max(LENS)) < torch.tensor(LENS)[:, None]
    expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    assert_close(torch.cat(hidden), expected[mask], 1e-5)

    mean = (expected * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    for kind, vectors in (("mean", mean), ("cls", expected[:, 0])):
        for normalize in (False, True):
            found = torch.stack([pool(one, kind, normalize) for one in hidden])
            wanted = torch.nn.functional.normalize(vectors) if normalize else vectors
            assert_close(found, wanted, 1e-5)


def test_parameters_are_counted_without_the_pooler(tmp_path: Path) -> None:
    theirs = reference(tmp_path, "Bert")
    config = load_model_config(EngineArgs(str(tmp_path)))
    counted = sum(p.numel() for n, p in theirs.named_parameters() if "pooler" not in n)
    assert config.num_parameters() == counted
    assert config.kv_bytes_per_token() == 0
    # Twice each matrix, and Q K^T and P V over 10 keys.
    matrices = 3 * (4 * 60 * 60 + 2 * 60 * 90)
    biases = 3 * (4 * 60 + 90 + 60)
    assert config.flops_per_token(10) == 2 * (matrices + biases) + 3 * 4 * 60 * 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_no_bit_of_a_text_depends_on_the_batch(tmp_path: Path, dtype: str) -> None:
    reference(tmp_path, "Bert")
    model = load(tmp_path, dtype)

    def vectors(batch: list[list[int]]) -> list[torch.Tensor]:
        hidden = model(batch)
        return [torch.cat((pool(one, "mean", True), one.float().flatten())) for one in hidden]

    alone = [vectors([text])[0] for text in texts()]
    for order in (range(10), range(9, -1, -1), (3, 8, 3, 0, 9, 1, 3)):
        together = vectors([texts()[index] for index in order])
        for index, found in zip(order, together, strict=True):
            assert_same_bits(found, alone[index])


@torch.inference_mode()
def test_a_text_that_overflows_leaves_the_others_alone(tmp_path: Path) -> None:
    reference(tmp_path, "Bert")
    model = load(tmp_path)
    expected = model([[7, 8, 9]])[0]
    model.embed_tokens.weight[5] = torch.inf
    bad, good = model([[6, 5, 7], [7, 8, 9]])
    assert bad.isnan().all()
    assert_same_bits(good, expected)
