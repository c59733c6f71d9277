"""``/admin/v1/requests``."""

from __future__ import annotations

from typing import Annotated, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from router.admin.audited_call import note_change
from router.admin.processes.overview import processes_of
from router.admin.views.missing import MissingProcess, in_words
from router.admin.views.request import ENDED, RequestDetail, RequestView
from router.http.openai_errors import shown
from router.observe.request_log import MAX_ENDED
from router.serving.services import Services, services_of
from wire.errors import AbortedRequestError, UnavailableError, UnknownIdError

MAX_LIMIT = 10_000

Found = TypeVar("Found", bound=RequestView)

PROCESS = Query(ge=0, description="index of the router process that has it; by default, any")


class RequestsView(BaseModel):
    requests: list[RequestView]
    missing: list[MissingProcess]


router = APIRouter()


@router.get("/requests")
async def list_requests(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 100
) -> RequestsView:
    """Lists requests in flight, then the last requests that have ended. Both parts begin with the newest
    request."""
    found = await processes_of(request).look(limit)
    return RequestsView(requests=found.requests(limit), missing=found.missing)


@router.get("/requests/{request_id}")
async def show_request(
    request: Request, request_id: str, process: Annotated[int | None, PROCESS] = None
) -> RequestDetail:
    """Shows one request with its timeline. Clients choose ids: if several processes have a request with this
    id, shows the newest one, or one in flight."""
    own = own_request(services_of(request), request_id)
    return await _everywhere(request, "GET", request_id, RequestDetail, own, process)


@router.post("/requests/{request_id}/abort")
async def abort_request(
    request: Request, request_id: str, process: Annotated[int | None, PROCESS] = None
) -> RequestView:
    """Ends a request: its client gets an error with the code ``aborted``. A request that has ended is not
    changed. Without ``process``, all requests with this id are ended."""
    services = services_of(request)
    is_here = process is None or process == services.process
    record = services.requests.find(request_id) if is_here else None
    before = None if record is None else RequestView.of(record, services.recent.now_s, services.process).state
    own = abort_own(services, request_id) if is_here else None
    found = await _everywhere(request, "POST", request_id, RequestView, own, process)
    note_change(request, before=before, after="aborted" if found.state not in ENDED else found.state)
    return found


def own_request(services: Services, request_id: str) -> RequestDetail | None:
    """Return a request of this process; None if there is none with this id."""
    record = services.requests.find(request_id)
    if record is None:
        return None
    return RequestDetail.of(record, services.recent.now_s, services.process)


def abort_own(services: Services, request_id: str) -> RequestView | None:
    """End a request of this process and return it; None if there is none with this id."""
    record = services.requests.find(request_id)
    if record is None:
        return None
    record.abort(AbortedRequestError.by_operator())
    return RequestView.of(record, services.recent.now_s, services.process)


async def _everywhere(
    request: Request, method: str, request_id: str, kind: type[Found], own: Found | None, process: int | None
) -> Found:
    """Return the request that this process (``own``) or one of its siblings has. Raises
    :class:`UnknownIdError`, or :class:`UnavailableError` if a sibling that does not answer may have it."""
    found = [] if own is None or process not in (None, own.process) else [own]
    missing: list[MissingProcess] = []
    siblings = processes_of(request).siblings
    if siblings is not None and process in (None, *siblings.ports):
        path = f"/requests/{quote(request_id, safe='')}{'/abort' if method == 'POST' else ''}"
        answers, missing = await siblings.ask_all(method, path, kind, only=process)
        found += answers.values()
    if found:
        return min(found, key=lambda one: (one.state in ENDED, -one.received_at))
    if missing:
        raise UnavailableError.told(
            f"no router process that answers has a request {shown(request_id)}, but "
            f"{in_words(missing)}: ask again later"
        )
    raise UnknownIdError(
        f"no request {shown(request_id)} is in flight or among the last {MAX_ENDED} that have ended: "
        "GET /admin/v1/requests lists them"
    )
