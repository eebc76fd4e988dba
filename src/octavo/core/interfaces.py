"""What the core asks of the layers above it, so that it imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.request import Request
    from octavo.core.scheduler_output import SchedulerOutput


class KVConnectorScheduler:
    """Scheduler role of a KV connector: finds K/V outside this engine and arranges its transfer.

    This one is no connector: nothing is found elsewhere and nothing is kept.
    """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens past `num_computed_tokens` that can be loaded, and whether that takes time."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request, block_ids: list[int], num_external_tokens: int
    ) -> None:
        """The blocks that will receive the loaded tokens."""

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        """The message to the worker role that travels with this plan."""
        return None

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        """True if the blocks must stay until the connector says they were sent."""
        return False
