"""A little runner for tests: paged caches, scattered blocks, and steps of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.attention.base import CommonAttentionMetadata
from octavo.attention.groups import make_backend
from octavo.attention.native import make_cpu_attention
from octavo.config.model import ModelConfig
from octavo.models.decoder import TORCH_DTYPES, DecoderModel
from octavo.weights.loader import load_model


def common_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
) -> CommonAttentionMetadata:
    """The step in which request r runs its last query_lens[r] tokens of seq_lens[r]."""
    width = max(len(table) for table in tables)
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    positions = [
        torch.arange(seq - query, seq) for query, seq in zip(query_lens, seq_lens, strict=True)
    ]
    slots = [
        torch.tensor(table)[position // block_size] * block_size + position % block_size
        for table, position in zip(tables, positions, strict=True)
    ]
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(padded, dtype=torch.int32),
        slot_mapping=torch.cat(slots),
        positions=torch.cat(positions),
    )


def for_groups(common: CommonAttentionMetadata, num_groups: int) -> CommonAttentionMetadata:
    """The same table for each KV group: for tests whose layers have caches of their own."""
    if num_groups == 1:
        return common
    tables = common.block_tables.expand(num_groups, -1, -1)
    slots = common.slot_mapping.expand(num_groups, -1)
    return replace(common, block_tables=tables, slot_mapping=slots)


class BlockTables:
    """Hands out scattered blocks, so that a wrong address shows."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
        self.tables: list[list[int]] = []

    def add(self, num_tokens: int) -> int:
        """Index of a new request with room for num_tokens."""
        count = -(-num_tokens // self.block_size)
        self.tables.append([self.free.pop() for _ in range(count)])
        return len(self.tables) - 1


class PagedModel:
    """A loaded model with caches; each step runs some tokens of some requests."""

    def __init__(self, config: ModelConfig, block_size: int = 16, num_blocks: int = 256) -> None:
        dtype = TORCH_DTYPES[config.dtype]
        self.groups = config.layer_groups()
        self.backend = make_backend(
            [config.window(group[0]) for group in self.groups],
            lambda window: make_cpu_attention(config, dtype, block_size, window),
        )
        self.model: DecoderModel = load_model(config, self.backend, torch.device("cpu"))
        self.config, self.block_size, self.num_blocks = config, block_size, num_blocks
        self.reset()

    def reset(self, seed: int = 0) -> None:
        """Empty caches and new tables."""
        shape = self.backend.kv_cache_shape(
            self.num_blocks, self.config.kv_cache_spec(self.block_size)
        )
        dtype = TORCH_DTYPES[self.config.dtype]
        self.caches = [torch.zeros(shape, dtype=dtype) for _ in range(self.config.num_layers)]
        self.blocks = BlockTables(self.num_blocks, self.block_size, seed)
        self.computed: list[int] = []

    def add(self, num_tokens: int) -> int:
        """A new request with room for num_tokens."""
        self.computed.append(0)
        return self.blocks.add(num_tokens)

    def step(self, chunks: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the next tokens of each request; their logits, (tokens, vocab_size) fp32 each."""
        hidden = self.hidden_step(chunks)
        with torch.inference_mode():
            return {request: self.model.compute_logits(rows) for request, rows in hidden.items()}

    @torch.inference_mode()
    def hidden_step(self, chunks: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the next tokens of each request; their final hidden states."""
        lens = [len(chunk) for chunk in chunks.values()]
        for request, length in zip(chunks, lens, strict=True):
            self.computed[request] += length
        common = common_metadata(
            lens,
            [self.computed[request] for request in chunks],
            [self.blocks.tables[request] for request in chunks],
            self.block_size,
        )
        common = for_groups(common, len(self.groups))
        metadata = self.backend.build_metadata(common)
        ids = torch.cat(list(chunks.values()))
        hidden = self.model.forward(ids, common, self.caches, metadata)
        return dict(zip(chunks, torch.split(hidden, lens), strict=True))

    def step_from_empty(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of one request run alone at once."""
        self.reset()
        return self.step({self.add(len(tokens)): tokens})[0]

    def solo(self, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
        """Final hidden states of one request run alone in chunks of the given size."""
        self.reset(seed=chunk)
        request = self.add(len(tokens))
        parts = tokens.split(chunk)
        return torch.cat([self.hidden_step({request: part})[request] for part in parts])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """Fails on NaN or infinity in either, and on any difference above `tolerance`. Returns it."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all(), "not finite"
    assert torch.isfinite(expected).all(), "reference not finite"
    difference = (actual.double() - expected.double()).abs().max().item()
    assert difference <= tolerance, f"difference {difference:.3g} > {tolerance:.3g}"
    return difference


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fails on NaN and on any bit."""
    assert torch.isfinite(actual).all(), "not finite"
    assert torch.equal(actual, expected), (
        f"{(actual != expected).sum().item()} of {actual.numel()} numbers differ, "
        f"at most by {(actual.double() - expected.double()).abs().max().item():.3g}"
    )


def settings(**changes: Any) -> dict[str, Any]:
    """A small Llama config.json as a dict."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
