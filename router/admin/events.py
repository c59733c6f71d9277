"""``GET /admin/v1/events``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from router.admin.processes.feed import EventFeed, encoded
from router.admin.processes.merged_feed import merged_events
from router.admin.processes.overview import processes_of
from router.serving.services import services_of

router = APIRouter()

DESCRIPTION = (
    "Server-sent events `worker`, `request`, `config`, `stats`, `keys`, `models` and `processes`, with the "
    "objects that the addresses of those names show: first everything as it is, then what changes; `stats`, "
    "and requests that decode, once a second. An event `worker_removed` names a worker that was removed."
)
ROLE_CHECK_S = 1.0
"""How often it is checked that the reader still has its role: keys are removed, and tokens expire."""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@router.get(
    "/events",
    response_class=StreamingResponse,
    description=DESCRIPTION,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(request: Request) -> StreamingResponse:
    return StreamingResponse(_events(request), media_type="text/event-stream", headers=HEADERS)


async def _events(request: Request) -> AsyncGenerator[bytes, None]:
    services, siblings = services_of(request), processes_of(request).siblings
    merged = merged_events(services.process, feed_of(request), siblings)
    checked_s = time.monotonic()
    try:
        async for batch in merged:  # something comes once a second at least
            if time.monotonic() - checked_s >= ROLE_CHECK_S:
                if not await services.credentials.has_role("view", request.scope):
                    return
                checked_s = time.monotonic()
            if batch:
                yield b"".join(encoded(name, view) for name, view in batch)
    finally:
        await merged.aclose()


def feed_of(request: Request) -> EventFeed:
    return cast(EventFeed, request.app.state.event_feed)
