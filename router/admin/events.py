"""``GET /admin/v1/events``."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from router.admin.event_feed import EventFeed

router = APIRouter()

DESCRIPTION = (
    "Server-sent events `worker`, `request`, `config` and `stats`, with the objects that the addresses of "
    "those names show: all there is at first, then what changes; `stats`, and requests that decode, once a "
    "second. An event `worker_removed` names a worker that there is no longer."
)


@router.get(
    "/events",
    response_class=StreamingResponse,
    description=DESCRIPTION,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(request: Request) -> StreamingResponse:
    feed = cast(EventFeed, request.app.state.event_feed)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.events(), media_type="text/event-stream", headers=headers)
