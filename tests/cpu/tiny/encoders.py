"""Folders of small random embedding models, as sentence-transformers leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.config.model import ModelConfig
from octavo.models.bert import weight_map

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "sea", "##s", "ship", "wind", "a", "the", "old"]
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "torch_dtype": "float32",
}
STEPS = ("Transformer", "Pooling", "Normalize")


def write_encoder(
    folder: Path,
    *,
    steps: tuple[str, ...] = STEPS,
    pooling: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A complete folder. pooling: 1_Pooling/config.json; settings: sentence_bert_config.json."""

    def write(name: str, content: Any) -> None:
        (folder / name).write_text(json.dumps(content))

    config = CONFIG | changes
    write("config.json", config)
    kinds = [f"sentence_transformers.models.{step}" for step in steps]
    paths = ("", "1_Pooling", "2_Normalize")
    write("modules.json", [{"path": p, "type": k} for p, k in zip(paths, kinds, strict=False)])
    (folder / "1_Pooling").mkdir(exist_ok=True)
    write("1_Pooling/config.json", pooling or {"pooling_mode_mean_tokens": True})
    write("sentence_bert_config.json", settings or {"max_seq_length": 64, "do_lower_case": False})

    generator = torch.Generator().manual_seed(0)
    targets = weight_map(ModelConfig.from_hf(CONFIG, folder, "safetensors"))
    tensors = {
        name: torch.randn(target.shape, generator=generator) * 0.2
        for name, target in targets.items()
    }
    # What such checkpoints carry and nobody reads.
    tensors["embeddings.position_ids"] = torch.arange(80)[None]
    tensors["pooler.dense.weight"], tensors["pooler.dense.bias"] = (
        torch.ones(64, 64),
        torch.ones(64),
    )
    save_file(tensors, folder / "model.safetensors")

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(6)  # as real ones have it for training
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
