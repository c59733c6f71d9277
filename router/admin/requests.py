"""``/admin/v1/requests``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from router.admin.request_view import RequestDetail, RequestsView, RequestView
from router.openai_errors import shown
from router.request_log import MAX_ENDED
from router.request_record import RequestRecord
from router.services import Services, services_of
from wire.errors import AbortedRequestError, UnknownIdError

MAX_LIMIT = 10_000

router = APIRouter()


@router.get("/requests")
async def list_requests(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 100
) -> RequestsView:
    """Those in flight, then the last that have ended; of each the newest first."""
    services = services_of(request)
    now_s = services.recent.now_s
    return RequestsView(requests=[RequestView.of(one, now_s) for one in services.requests.newest(limit)])


@router.get("/requests/{request_id}")
async def show_request(request: Request, request_id: str) -> RequestDetail:
    """One request with its timeline."""
    services = services_of(request)
    return RequestDetail.of(_find(services, request_id), services.recent.now_s)


@router.post("/requests/{request_id}/abort")
async def abort_request(request: Request, request_id: str) -> RequestView:
    """Ends a request: its client gets an error with the code ``aborted``. An ended one stays as it is."""
    services = services_of(request)
    record = _find(services, request_id)
    record.abort(AbortedRequestError.by_operator())
    return RequestView.of(record, services.recent.now_s)


def _find(services: Services, request_id: str) -> RequestRecord:
    record = services.requests.find(request_id)
    if record is None:
        raise UnknownIdError(
            f"no request {shown(request_id)} is in flight or among the last {MAX_ENDED} that have ended: "
            "GET /admin/v1/requests lists them"
        )
    return record
