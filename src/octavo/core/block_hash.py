"""Chained hashes of full KV blocks: the names under which computed prefixes are found.

A hash covers the parent's hash, the block's token ids and the extra keys, each tagged by its kind.
The seed is a constant, so replicas agree. A hash only finds a candidate: `BlockPool.find`
compares the content itself, so a weak hash function costs hits, never correctness.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

from octavo.core.request import EngineRequest

ExtraKeys = tuple[tuple[str, str], ...]
"""(kind, value) pairs that separate equal token ids, such as ("salt", "tenant-7")."""

HashFunction = Callable[[bytes | None, Sequence[int], ExtraKeys], bytes]

SEED = hashlib.sha256(b"octavo kv block 1").digest()


def hash_block(parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys) -> bytes:
    """sha256 of one full block; `parent` is None for the first block of a prompt.

    Every part has a length in front of it or a fixed width, so no two inputs encode alike.
    """
    digest = hashlib.sha256(SEED if parent is None else parent)
    digest.update(struct.pack(f"<I{len(token_ids)}q", len(token_ids), *token_ids))
    for pair in extra_keys:
        for text in pair:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


def request_extra_keys(engine_request: EngineRequest) -> ExtraKeys:
    """What besides token ids decides the K/V of this request, or who may share it."""
    salt = engine_request.cache_salt
    return () if salt is None else (("salt", salt),)
