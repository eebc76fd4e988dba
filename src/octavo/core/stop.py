"""When a request has ended, decided on token ids. Stop strings belong to the output processor."""

from __future__ import annotations

from octavo.core.request import Request, RequestStatus


def append_until_stop(
    request: Request, token_ids: list[int]
) -> tuple[int, tuple[RequestStatus, int | None] | None]:
    """Append sampled tokens up to the first that ends the request; the rest is dropped.

    Returns how many were appended; and the final status and stop_reason if the request ends.
    """
    engine_request, output = request.engine_request, request.output_token_ids
    params = engine_request.sampling_params
    for count, last in enumerate(token_ids, 1):
        output.append(last)
        if len(output) >= params.min_tokens:
            if last in engine_request.eos_token_ids:
                return count, (RequestStatus.FINISHED_STOPPED, None)
            if params.stop_token_ids and last in params.stop_token_ids:
                return count, (RequestStatus.FINISHED_STOPPED, last)
        if len(output) >= request.output_limit:
            return count, (RequestStatus.FINISHED_LENGTH, None)
    return len(token_ids), None
