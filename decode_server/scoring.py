"""Prompts that a server of both roles only scores: no answer is wanted, the prompt's log-probabilities alone.

Such a request ends as it would on a prefill server, with all but its last token computed.
"""

from __future__ import annotations

from engine.request import Request
from wire.errors import InvalidRequestError
from wire.generation import RequestOutput, Submit


def scored_request(message: Submit) -> Request:
    """What the engine is to compute. Raises :class:`InvalidRequestError` for a prompt without scores."""
    if message.ticket is not None or len(message.token_ids) < 2:
        raise InvalidRequestError(
            "a prompt that is only scored comes without a ticket, and has two tokens at least: "
            "the first one has no log-probability"
        )
    return Request(
        message.request_id,
        list(message.token_ids),
        params=None,
        prompt_logprobs_wanted=message.prompt_logprobs,
        cache_salt=message.cache_salt,
    )


def scores(request: Request) -> RequestOutput:
    """All that the request's client gets."""
    return RequestOutput(
        request.request_id,
        (),
        prompt_logprobs=tuple(request.prompt_logprobs),
        finish_reason="length",
        stats=request.measured.stats(),
    )
