"""Who gives up blocks when memory runs out: a pure choice by cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from octavo.core.request import Request


def choose_victim(
    candidates: Iterable[Request], num_missing: int, num_freeable: Callable[[Request], int]
) -> Request | None:
    """The candidate with the fewest tokens to recompute per block that is really gained.

    Gained are blocks that nobody else holds, and no more than are missing: dropping a long request
    for one block is expensive however many it holds. Candidates come in order; of equals the last.
    """
    victim, lowest = None, math.inf
    for request in candidates:
        gain = min(num_freeable(request), num_missing)
        cost = request.num_planned_tokens / gain if gain else math.inf
        if victim is None or cost <= lowest:
            victim, lowest = request, cost
    return victim
