"""Small random models of transformers, saved as checkpoints, and the comparison with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.config.engine import EngineArgs
from octavo.weights.checkpoint import load_model_config
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}


def reference(folder: Path, family: str, **changes: Any) -> Any:
    """A random model saved into the folder, with biases and norms not trivial.

    family: as transformers' classes begin, "Llama"; that of the config and of the model, where they
    differ, as "Gemma3Text:Gemma3".
    """
    torch.manual_seed(0)
    of_config, _, of_model = family.partition(":")
    config = getattr(transformers, f"{of_config}Config")(**{**BASE, **changes})
    kind = getattr(transformers, f"{of_model or of_config}ForCausalLM")
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5).sub_(1.0 if "Gemma" in family else 0.0)
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: Any = "auto", block_size: int = 16) -> PagedModel:
    return PagedModel(load_model_config(EngineArgs(str(folder), dtype=dtype)), block_size)


def check_logits(folder: Path, model: Any) -> None:
    """300 tokens (two splits of keys) in uneven chunks, fp32, within 1e-4 of the saved `model`."""
    tokens = torch.randint(3, 131, (300,))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    ours = load(folder)
    assert ours.config.dtype == "float32"
    assert ours.config.num_parameters() == sum(p.numel() for p in model.parameters())
    request = ours.add(300)
    parts = tokens.split([37, 200, 1, 1, 61])
    logits = torch.cat([ours.step({request: part})[request] for part in parts])
    assert_close(logits, expected, 1e-4)


def check_chunks(folder: Path, dtype: str) -> None:
    """No bit depends on chunk and block size."""
    tokens = torch.randint(3, 131, (270,))
    expected = load(folder, dtype).solo(tokens, 270)
    for block_size, chunk in ((64, 250), (16, 64), (32, 37)):
        assert_same_bits(load(folder, dtype, block_size).solo(tokens, chunk), expected)
    assert_same_bits(load(folder, dtype).solo(tokens[:60], 7), expected[:60])
