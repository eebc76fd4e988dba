"""Requests that can never run are refused here, before they wait for what will never come."""

from __future__ import annotations

from octavo.config.engine import SchedulerConfig
from octavo.config.kv_cache import KVCacheLayout
from octavo.core.request import EngineRequest
from octavo.errors import InvalidRequestError


def check_can_ever_run(
    request: EngineRequest, config: SchedulerConfig, layout: KVCacheLayout, num_usable_blocks: int
) -> None:
    """Raise InvalidRequestError unless the request could finish alone on an idle engine.

    Liveness rests on this rule: whoever is first in order can always be given all it needs.
    """
    num_prompt = len(request.prompt_token_ids)
    limit = config.max_model_len
    if num_prompt == 0:
        raise InvalidRequestError("prompt", "is empty")
    if num_prompt > limit:
        raise InvalidRequestError("prompt", f"{num_prompt} tokens exceed max_model_len={limit}")
    if num_prompt == limit and request.max_tokens > 0:
        raise InvalidRequestError(
            "prompt",
            f"{num_prompt} tokens fill max_model_len={limit} and leave no room for an output token"
            " (max_tokens=0 asks for prompt scores only)",
        )
    num_total = min(num_prompt + request.max_tokens, limit)
    if layout.peak_blocks(num_total) > num_usable_blocks:
        alone = layout.peak_blocks(num_prompt + min(1, request.max_tokens)) > num_usable_blocks
        num_slots = layout.most_tokens(num_usable_blocks, limit)
        raise InvalidRequestError(
            "prompt" if alone else "max_tokens",
            f"{num_prompt} prompt tokens and up to {num_total - num_prompt} output tokens"
            f" exceed the KV cache of {num_slots} tokens",
        )
