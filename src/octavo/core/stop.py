"""When a request has ended, decided on token ids. Stop strings belong to the output processor."""

from __future__ import annotations

from octavo.core.request import Request, RequestStatus


def check_stop(request: Request) -> tuple[RequestStatus, int | None] | None:
    """Final status and stop_reason if the last output token ends the request, else None."""
    engine_request, output = request.engine_request, request.output_token_ids
    last, num_output = output[-1], len(output)
    params = engine_request.sampling_params
    if num_output >= params.min_tokens:
        if last in engine_request.eos_token_ids:
            return RequestStatus.FINISHED_STOPPED, None
        if params.stop_token_ids and last in params.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED, last
    if num_output >= request.output_limit:
        return RequestStatus.FINISHED_LENGTH, None
    return None


def append_until_stop(
    request: Request, token_ids: list[int]
) -> tuple[int, tuple[RequestStatus, int | None] | None]:
    """Append sampled tokens up to the first that ends the request; the rest is dropped.

    Returns how many were appended and what check_stop said to the last of them.
    """
    count = 0
    for token_id in token_ids:
        count += 1
        request.output_token_ids.append(token_id)
        if (stop := check_stop(request)) is not None:
            return count, stop
    return count, None
