"""Attention of models whose layers do not all see the same keys: a backend and a block table a KV group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from octavo.attention.base import AttentionPlanner, CommonAttentionMetadata
from octavo.config.kv_cache import KVCacheSpec


class GroupedAttention:
    """Plans steps for all groups together. Layers call the backend of their own group."""

    def __init__(self, backends: Sequence[AttentionPlanner]) -> None:
        """backends: one a group; groups may share one."""
        self.backends = backends

    def build_metadata(
        self, common: CommonAttentionMetadata
    ) -> list[tuple[CommonAttentionMetadata, Any]]:
        """For each group its part of `common`, and what its backend made of that."""
        parts = [
            replace(common, block_tables=tables, slot_mapping=slots)
            for tables, slots in zip(common.block_tables, common.slot_mapping, strict=True)
        ]
        first: dict[AttentionPlanner, Any] = {}  # groups that share a backend share its plan
        metadata = []
        for part, backend in zip(parts, self.backends, strict=True):
            if backend in first:
                metadata.append((part, backend.with_tables(first[backend], part)))
            else:
                first[backend] = backend.build_metadata(part)
                metadata.append((part, first[backend]))
        return metadata

    def kv_cache_shape(self, num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """The same for all groups."""
        return self.backends[0].kv_cache_shape(num_blocks, spec)


ModelBackend = AttentionPlanner | GroupedAttention


def make_backend(
    windows: Sequence[int | None], make: Callable[[int | None], AttentionPlanner]
) -> ModelBackend:
    """The backend for groups of layers with these windows; `make` makes one for a window."""
    if len(windows) == 1:
        return make(windows[0])
    made = {window: make(window) for window in dict.fromkeys(windows)}
    return GroupedAttention([made[window] for window in windows])


def group_backend(backend: ModelBackend, group: int) -> AttentionPlanner:
    """What the layers of a group call."""
    return backend.backends[group] if isinstance(backend, GroupedAttention) else backend
