"""Worker role of a KV connector: moves K/V between this rank's cache and somewhere else.

The scheduler role is in `core/interfaces.py`; what it decides arrives here as the plan's opaque
`kv_connector_metadata`.
"""

from __future__ import annotations

from typing import Any

import torch


class KVConnectorWorker:
    """Called by the model runner around each step, on the worker's thread. This one moves nothing."""

    def register_kv_caches(self, kv_caches: list[torch.Tensor]) -> None:
        """The caches, one a layer, shaped by the attention backend. Once, before the first step."""

    def start_load_kv(self, metadata: Any) -> None:
        """Before the forward: begin the loads the plan asks for; what this step reads is there
        when it returns."""

    def save_kv(self, metadata: Any) -> None:
        """After the forward: begin to send what the plan asks for."""
