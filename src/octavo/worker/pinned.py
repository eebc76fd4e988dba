"""Staging memory that the host writes and the GPU reads directly: a ring of pinned buffers."""

from __future__ import annotations

import numpy as np
import torch


class PinnedRing:
    """int32 buffers used in turn; one is written again only when the GPU has read it.

    On a GPU for the stream that is current at construction. On a CPU device the buffers are plain
    memory, and nothing is waited for.
    """

    def __init__(self, device: torch.device, size: int, depth: int = 4) -> None:
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.current_stream() if self._pinned else None
        self._buffers = [self._allocate(size) for _ in range(depth)]
        self._read: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def stage(self, parts: list[np.ndarray]) -> torch.Tensor:
        """A buffer that begins with the parts (int32), one after the other.

        After launching the kernels that read it, call `release`.
        """
        total = sum(len(part) for part in parts)
        if (event := self._read[self._next]) is not None:
            event.synchronize()
        if total > len(self._buffers[self._next]):
            self._buffers[self._next] = self._allocate(2 * total)
        buffer = self._buffers[self._next]
        if parts:
            np.concatenate(parts, out=buffer.numpy()[:total])
        return buffer

    def release(self) -> None:
        """The kernels launched so far are the last to read the staged buffer."""
        if self._pinned:
            event = self._read[self._next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._read[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
