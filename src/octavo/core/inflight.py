"""Steps that were launched and not settled, and the blocks that wait for them.

Owns the in-flight counters of requests. A launched step may still read and write the blocks of a
request that has ended or was preempted since, so these return only when the last step that was
launched at that time has been settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from octavo.core.block_pool import KVBlock
from octavo.core.request import Request

LaunchedRequest = tuple[Request, int, int, int]
"""What one step was asked to do for one request: the request; its epoch at launch, since a preemption
after that makes computed tokens void; tokens to compute; and tokens that the step may bring: 0, or the
accepted drafts and the bonus token. A tuple, since 256 of them are made and read three times a step."""


class InflightSteps:
    """Launched steps in order, and blocks fenced by them."""

    def __init__(self, release: Callable[[list[KVBlock]], None]) -> None:
        self.last_step_id = 0
        self._release = release
        self._steps: deque[tuple[int, list[LaunchedRequest]]] = deque()
        self._deferred: deque[tuple[int, list[KVBlock]]] = deque()
        self.num_deferred_blocks = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[LaunchedRequest]:
        return (launched for _, requests in self._steps for launched in requests)

    def launch(self, requests: list[LaunchedRequest]) -> int:
        """Count the step as in flight and return its id."""
        self.last_step_id += 1
        self._steps.append((self.last_step_id, requests))
        for request, _, num_tokens, num_samples in requests:
            request.num_inflight_tokens += num_tokens
            request.num_inflight_samples += num_samples
        return self.last_step_id

    def settle(self, step_id: int) -> list[LaunchedRequest]:
        """Take the oldest step, which must be this one, out of the counters."""
        expected = self._steps[0][0] if self._steps else None
        assert step_id == expected, f"step {step_id} settled, but {expected} is the oldest"
        _, requests = self._steps.popleft()
        for request, _, num_tokens, num_samples in requests:
            request.num_inflight_tokens -= num_tokens
            request.num_inflight_samples -= num_samples
        return requests

    def free(self, blocks: list[KVBlock]) -> None:
        """Release the blocks once no step launched so far is in flight."""
        if not self._steps:
            self._release(blocks)
        elif blocks:
            self._deferred.append((self.last_step_id, blocks))
            self.num_deferred_blocks += len(blocks)

    def release_settled(self) -> None:
        """Release the blocks whose last step has been settled."""
        oldest = self._steps[0][0] if self._steps else self.last_step_id + 1
        while self._deferred and self._deferred[0][0] < oldest:
            _, blocks = self._deferred.popleft()
            self.num_deferred_blocks -= len(blocks)
            self._release(blocks)

    def deferred_blocks(self) -> Iterator[KVBlock]:
        """Blocks that wait, once per holder they had."""
        return (block for _, blocks in self._deferred for block in blocks)
