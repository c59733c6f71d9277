"""``/admin/process``: what the router processes on one port ask one another. They know a secret that
operators do not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from router.admin.changes import Entries, Stamps, changes_of
from router.admin.events import HEADERS, feed_of
from router.admin.processes.channel import PREFIX
from router.admin.processes.feed import encoded
from router.admin.processes.overview import processes_of
from router.admin.requests import MAX_LIMIT, abort_own, own_request
from router.admin.views.process import ProcessReport
from router.admin.views.request import RequestDetail, RequestView
from router.http.bodies.json_body import read_json
from router.http.openai_errors import shown
from router.serving.services import services_of
from wire.errors import UnknownIdError

router = APIRouter(prefix=PREFIX, include_in_schema=False)


@router.get("/report")
async def report(request: Request, limit: Annotated[int, Query(ge=0, le=MAX_LIMIT)] = 0) -> ProcessReport:
    return processes_of(request).own_report(limit)


@router.get("/events")
async def events(request: Request) -> StreamingResponse:
    return StreamingResponse(_events(request), media_type="text/event-stream", headers=HEADERS)


async def _events(request: Request) -> AsyncGenerator[bytes, None]:
    own = feed_of(request).events()
    try:
        async for batch in own:
            yield b"".join(encoded(name, view) for name, view in batch)
    finally:
        await own.aclose()


@router.get("/requests/{request_id}")
async def show_request(request: Request, request_id: str) -> RequestDetail:
    found = own_request(services_of(request), request_id)
    if found is None:
        raise UnknownIdError(f"this process has no request {shown(request_id)}")
    return found


@router.post("/requests/{request_id}/abort")
async def abort_request(request: Request, request_id: str) -> RequestView:
    found = abort_own(services_of(request), request_id)
    if found is None:
        raise UnknownIdError(f"this process has no request {shown(request_id)}")
    return found


@router.post("/ledger")
async def take_over(request: Request) -> Entries:
    """Takes changes over. Returns those of this process that are newer than the same changes there."""
    told = (await read_json(request, Entries)).entries
    changes = changes_of(request)
    await changes.take_over(told)
    places = {entry.place: entry.stamp for entry in told}
    newer = [one for one in changes.newer_than({}) if one.stamp > places.get(one.place, one.stamp)]
    return Entries(entries=newer)


@router.post("/ledger/newer")
async def newer(request: Request) -> Entries:
    """Returns the changes that a process with these stamps does not know."""
    known = (await read_json(request, Stamps)).stamps
    return Entries(entries=changes_of(request).newer_than(known))
