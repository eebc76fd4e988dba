"""A talking mixture of experts with a known answer: SmolLM2, each expert its MLP in other clothes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.config.engine import EngineArgs
from octavo.config.model import ModelConfig
from octavo.config.moe import MoEConfig
from octavo.engine.tokenizer import load_tokenizer
from octavo.models.registry import build_model, weight_map
from octavo.weights import gguf
from octavo.weights.checkpoint import load_model_config
from octavo.weights.loader import fill
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits

EXPERTS = 3
PROMPT = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    "The capital of France is"
)


def upcycled(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The dense weights, a random router, and experts whose neurons are those of the MLP shuffled.

    All experts compute the same function, and none has a weight at the place of another's: parts
    of two experts together would answer nonsense.
    """
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(config.intermediate_size, generator=generator) for _ in range(EXPERTS)]
    for name, tensor in gguf.iterate_tensors(gguf.GGUFFile(config.path), config):
        before, dot, part = name.partition(".mlp.")
        if not dot:
            yield name, tensor
            continue
        for expert, order in enumerate(orders):
            shuffled = tensor[:, order] if part.startswith("down") else tensor[order]
            yield f"{before}.mlp.experts.{expert}.{part}", shuffled
        if part.startswith("down"):
            router = torch.randn(EXPERTS, config.hidden_size, generator=generator)
            yield f"{before}.mlp.gate.weight", router


def greedy(model: PagedModel, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Tokens one at a time, and the logits of all positions but the last token's."""
    model.reset()
    request, given = model.add(len(prompt) + count), torch.tensor(prompt)
    tokens, logits = [], []
    for _ in range(count):
        logits.append(model.step({request: given})[request])
        given = logits[-1][-1:].argmax(-1)
        tokens.append(int(given))
    return tokens, torch.cat(logits)


@pytest.mark.soak  # 18 s; mixtures are checked on tiny models in `make test`
def test_upcycled_smollm2_answers_as_smollm2(smollm2_path: Path) -> None:
    """fp32: logits within rounding, the same tokens; and decoding has the bits of a prefill."""
    tokenizer = load_tokenizer(smollm2_path)
    prompt = tokenizer.encode(PROMPT)
    dense = PagedModel(load_model_config(EngineArgs(str(smollm2_path), dtype="float32")))
    expected, scores = greedy(dense, prompt, 6)
    assert "Paris" in tokenizer.decode(expected)

    moe = MoEConfig(EXPERTS, 2, dense.config.intermediate_size, renormalise=True)
    config = replace(dense.config, architecture="MixtralForCausalLM", moe=moe)
    sparse = dense
    sparse.model = build_model(config, dense.backend, torch.device("cpu"))
    fill(sparse.model, weight_map(config), upcycled(config), "up-cycled")
    sparse.model.finalize("tiled")
    tokens, got = greedy(sparse, prompt, 6)
    assert tokens == expected
    assert assert_close(got, scores, 2e-3) > 0
    again = sparse.step_from_empty(torch.tensor([*prompt, *tokens[:-1]]))
    assert_same_bits(again, got)
