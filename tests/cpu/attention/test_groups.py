"""Layers of several KV groups over one cache: each attends as if its group were alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.groups import GroupedAttention, group_backend, make_backend
from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton_paged import TritonAttention
from octavo.config.kv_cache import KVCacheSpec
from tests.cpu.paged import assert_same_bits, common_metadata

SPEC = KVCacheSpec(block_size=16, num_kv_heads=2, head_dim=32, dtype_bytes=2)
WINDOWS = (None, 20, 20)
QUERY_LENS, SEQ_LENS = [1, 30, 5], [300, 70, 5]
MAKERS: dict[str, Callable[[int | None], AttentionBackend]] = {
    "reference": lambda window: ReferenceAttention(4, SPEC, window),
    "triton": lambda window: TritonAttention(4, SPEC, 4, 512, torch.device("cpu"), window),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_each_group_attends_with_its_own_table_and_window(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [-(-length // 16) for length in SEQ_LENS]
    ids = (1 + torch.randperm(3 * sum(lengths), generator=generator)).tolist()
    alone = [
        common_metadata(QUERY_LENS, SEQ_LENS, [[ids.pop() for _ in range(n)] for n in lengths], 16)
        for _ in WINDOWS
    ]
    together = replace(
        alone[0],
        block_tables=torch.stack([one.block_tables for one in alone]),
        slot_mapping=torch.stack([one.slot_mapping for one in alone]),
    )
    backend = make_backend(WINDOWS, MAKERS[kind])
    assert isinstance(backend, GroupedAttention)
    assert group_backend(backend, 1) is group_backend(backend, 2)
    cache = torch.randn(backend.kv_cache_shape(80, SPEC), generator=generator).bfloat16()
    cache[0] = 0
    query = torch.randn(sum(QUERY_LENS), 4, 32, generator=generator).bfloat16()
    outs = []
    for group, (part, metadata) in enumerate(backend.build_metadata(together)):
        assert part.slot_mapping.tolist() == alone[group].slot_mapping.tolist()
        outs.append(group_backend(backend, group).attend(query, cache, metadata, 0.2))
        single = MAKERS[kind](WINDOWS[group])
        expected = single.attend(query, cache, single.build_metadata(alone[group]), 0.2)
        assert_same_bits(outs[-1], expected)
    assert not torch.equal(outs[1], outs[2])


def test_one_group_has_a_plain_backend() -> None:
    backend = make_backend((7,), MAKERS["reference"])
    assert isinstance(backend, ReferenceAttention)
    assert backend.window == 7
    assert group_backend(backend, 0) is backend
