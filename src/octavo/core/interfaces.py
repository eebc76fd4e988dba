"""What the core asks of the layers above it, as protocols, so that it imports none of them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from octavo.core.request import Request
    from octavo.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs plans on the workers, in the order given."""

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Queue one step and return at once."""
        ...

    def shutdown(self) -> None:
        """Stop the workers; pending steps are finished first."""
        ...


class KVConnectorScheduler(Protocol):
    """Scheduler role of a KV connector: finds K/V outside this engine and arranges its transfer."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens past `num_computed_tokens` that can be loaded, and whether that takes time."""
        ...

    def update_state_after_alloc(
        self, request: Request, block_ids: list[int], num_external_tokens: int
    ) -> None:
        """The blocks that will receive the loaded tokens."""
        ...

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        """The message to the worker role that travels with this plan."""
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        """True if the blocks must stay until the connector says they were sent."""
        ...


class NullConnector:
    """No connector: nothing is found elsewhere and nothing is kept."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Nothing."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request, block_ids: list[int], num_external_tokens: int
    ) -> None:
        """Nothing to do."""

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        """No message."""
        return None

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        """Blocks may be freed at once."""
        return False


class GrammarState(Protocol):
    """Per-request state of a compiled grammar; the scheduler asks only these."""

    def ready(self) -> bool:
        """False while the grammar is being compiled."""
        ...

    def advance(self, token_ids: list[int]) -> None:
        """Accept sampled tokens; raises if the grammar forbids one."""
        ...
