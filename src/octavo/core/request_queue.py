"""Requests in the order of their right to run, for the waiting and the running ones alike.

A sorted list instead of a heap: in-order walks, exact removal from the middle and re-insertion of
a preempted request at its old place are each one bisect and one memmove.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from octavo.core.request import Request


def _order(request: Request) -> tuple[int, int]:
    return request.order


class RequestQueue:
    """Sorted by Request.order: (arrival) under FCFS, (priority, arrival) under priority."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        index = bisect_left(self._requests, request.order, key=_order)
        return index < len(self._requests) and self._requests[index] is request

    def add(self, request: Request) -> None:
        """Insert it at its place."""
        insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        """Take it out; it must be there."""
        index = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[index] is request, f"{request.request_id} is not in this queue"
        del self._requests[index]

    def after(self, request: Request) -> list[Request]:
        """Those with less right to run than this one."""
        return self._requests[bisect_right(self._requests, request.order, key=_order) :]
