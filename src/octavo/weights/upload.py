"""Tensors from files straight into GPU memory: several readers, pinned buffers, a fixed host cost."""

from __future__ import annotations

import io
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from octavo.errors import ModelLoadError

THREADS = 8
BUFFERS = 2 * THREADS
CHUNK_BYTES = 16 << 20
"""Of one read and one copy. BUFFERS x CHUNK_BYTES of host memory are pinned while loading."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where a tensor's bytes are."""

    path: Path
    start: int
    """Of the first byte, from the start of the file."""
    num_bytes: int


class FileUpload:
    """Copies file ranges into GPU tensors in the background; leaving the `with` block waits for all.

    Reads bypass the memory map of the files: one large read a chunk is what disks are fast at. The
    copies are queued on the default stream, whatever the creator's is, and have run when the block
    has ended: from then on any stream may use the tensors. Until then only the default stream may.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(THREADS, "weights")
        self._running: list[Future[None]] = []
        self._free: SimpleQueue[tuple[torch.Tensor, torch.cuda.Event]] = SimpleQueue()
        for _ in range(BUFFERS):
            memory = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            self._free.put((memory, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def start(self, source: FileRange, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Queue a tensor of `dtype` in the file -> the contiguous GPU tensor `target`, converting.

        ModelLoadError for a file that cannot be read so far comes when the `with` block ends.
        """
        self._running.append(self._pool.submit(self._copy, source, dtype, target))

    def __enter__(self) -> FileUpload:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None:
                for one in self._running:
                    one.result()
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def _copy(self, source: FileRange, dtype: torch.dtype, target: torch.Tensor) -> None:
        try:
            # A thread starts on device 0, whatever its creator's device.
            with torch.cuda.device(self._device), source.path.open("rb", buffering=0) as file:
                file.seek(source.start)
                for part in torch.split(target.view(-1), CHUNK_BYTES // dtype.itemsize):
                    self._copy_chunk(file, dtype, part)
        except OSError as error:
            raise ModelLoadError(f"{source.path}: unreadable ({error})") from error

    def _copy_chunk(self, file: io.FileIO, dtype: torch.dtype, part: torch.Tensor) -> None:
        buffer, copied = self._free.get()
        try:
            copied.synchronize()  # the copy before, out of the same buffer
            data = buffer[: part.numel() * dtype.itemsize]
            read_fully(file, data.numpy().data)
            values = data.view(dtype)
            if part.dtype != dtype:  # moved first: the GPU converts faster
                values = values.to(part.device, non_blocking=True)
            part.copy_(values, non_blocking=True)
            copied.record()
        finally:
            self._free.put((buffer, copied))


def read_fully(file: io.FileIO, memory: memoryview) -> None:
    """Fill `memory` from the file's position on. Raises ModelLoadError if the file ends before."""
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise ModelLoadError(f"{file.name}: truncated at byte {file.tell()}")
        done += count
