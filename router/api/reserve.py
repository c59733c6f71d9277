"""Reserves what a checked request may use of its API key's limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fastapi import Request

from router.quota.quota import RESERVATION, reserved_for
from router.serving.services import Services
from router.serving.text_request import TextRequest

MARGIN_S = 60.0
"""How long after its deadline a request's reservation lapses. By then its end is booked, unless its process
has died."""


async def reserve(http: Request, request: TextRequest, services: Services) -> TextRequest:
    """Return the request with its reservation. Raises :class:`RateLimitError` and :class:`QuotaError`."""
    max_model_len = request.model.servers.limits().max_model_len
    num_tokens = request.num_prompt_tokens + sum(
        reserved_for(len(prompt.token_ids), params.max_tokens, max_model_len)
        for prompt in request.prompts
        for params in request.params
    )
    reservation = await services.quota.reserve(
        request.client.api_key,
        num_tokens,
        path=http.scope["path"],
        lasts_s=request.deadline - asyncio.get_running_loop().time() + MARGIN_S,
    )
    http.scope["state"][RESERVATION] = reservation
    return replace(request, reservation=reservation)
