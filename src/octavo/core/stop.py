"""When a request has ended, decided on token ids. Stop strings belong to the output processor."""

from __future__ import annotations

from octavo.core.request import Request, RequestStatus


def output_limit(request: Request, max_model_len: int) -> int:
    """Output tokens this request may have at most; 0: it only wants prompt scores."""
    return min(request.engine_request.max_tokens, max_model_len - request.num_prompt_tokens)


def check_stop(request: Request, max_model_len: int) -> tuple[RequestStatus, int | None] | None:
    """Final status and stop_reason if the last output token ends the request, else None."""
    last = request.output_token_ids[-1]
    params = request.engine_request.sampling_params
    if request.num_output_tokens >= params.min_tokens:
        if last in request.engine_request.eos_token_ids:
            return RequestStatus.FINISHED_STOPPED, None
        if params.stop_token_ids and last in params.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED, last
    if request.num_output_tokens >= output_limit(request, max_model_len):
        return RequestStatus.FINISHED_LENGTH, None
    return None


def append_until_stop(
    request: Request, token_ids: list[int], max_model_len: int
) -> tuple[int, tuple[RequestStatus, int | None] | None]:
    """Append sampled tokens up to the first that ends the request; the rest is dropped.

    Returns how many were appended and what check_stop said to the last of them.
    """
    for count, token_id in enumerate(token_ids, start=1):
        request.output_token_ids.append(token_id)
        if (stop := check_stop(request, max_model_len)) is not None:
            return count, stop
    return len(token_ids), None
