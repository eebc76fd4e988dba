"""CUDA graphs of the forward pass, one a token bucket, from the inputs to the logits.

Attention is persistent and reads its work from the inputs, so a graph serves any mix of requests
whose tokens fit its bucket: decode, verification, small chunks. What is larger runs eager.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

MAX_TOKENS = 512
"""Largest bucket: beyond it launches hide behind the work."""


def bucket_sizes(limit: int) -> list[int]:
    """Token buckets up to `limit` and MAX_TOKENS, rising; the last one is as large as allowed.

    Steps of 8 waste at most an eighth from 64 tokens on. Fewer than 8 tokens cost no less than 8: the
    weights are read either way, and cuBLAS is slower with one row (docs/log.md).
    """
    limit = min(limit, MAX_TOKENS)
    sizes = [*range(8, 257, 8), *range(272, MAX_TOKENS + 1, 16)]
    return [size for size in sizes if size < limit] + [limit]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collects now, and not inside: the graphs of an engine that is gone, freed amid a capture, end it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaGraphs:
    """Captured once after the KV cache exists; `replay` may follow any change of the inputs."""

    def __init__(self, forward: Callable[[int], torch.Tensor], sizes: list[int]) -> None:
        """`forward(num_tokens)` reads and writes tensors at fixed addresses only."""
        self._sizes = sizes
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        start = time.perf_counter()
        with _no_garbage_collection():
            pool = torch.cuda.graph_pool_handle()
            for size in reversed(sizes):  # the largest first: the others fit into its memory
                forward(size)  # compiles and allocates what may not happen under capture
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    result = forward(size)
                self._graphs[size] = graph, result
        seconds = time.perf_counter() - start
        logger.info("captured %d CUDA graphs in %.1f s", len(sizes), seconds)

    def bucket(self, num_tokens: int) -> int | None:
        """The smallest bucket that holds so many tokens, if any does."""
        index = bisect_left(self._sizes, num_tokens)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, bucket: int) -> torch.Tensor:
        """Run the forward pass of a bucket on the current stream. Returns what it returned."""
        graph, result = self._graphs[bucket]
        graph.replay()
        return result
