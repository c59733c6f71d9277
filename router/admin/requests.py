"""``/admin/v1/requests``."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from router.http.openai_errors import shown
from router.observe.choice_timeline import EventName, TimelineEvent
from router.observe.request_log import MAX_ENDED
from router.observe.request_record import RequestRecord, RequestState
from router.serving.services import Services, services_of
from wire.errors import AbortedRequestError, UnknownIdError


class RequestView(BaseModel):
    """One HTTP request for text. With several choices, the workers are those of the first choice."""

    id: str
    model: str
    state: RequestState
    prompt_tokens: int
    generated_tokens: int
    """Tokens generated so far, over all choices."""
    choices: int
    prefill_worker: str | None
    decode_worker: str | None
    priority: int
    key_name: str | None
    received_at: float
    """When the request arrived, in seconds since 1970."""
    age_s: float
    """Seconds from the request's arrival to now, or to its end."""
    error: str | None
    """Code of the error that ended the request."""
    error_message: str | None
    """The full message of that error. The client's message may have fewer details."""

    @classmethod
    def of(cls, record: RequestRecord, now_s: float) -> RequestView:
        return cls(**_fields(record, now_s))


class RequestsView(BaseModel):
    requests: list[RequestView]


class TimelineEntry(BaseModel):
    """A part of a request's life. Times are seconds from the request's arrival."""

    name: EventName
    at_s: float
    duration_s: float | None
    """Null while this part is under way; 0 for an event that takes no time."""
    worker: str
    """Id of the server. Empty for parts in the router."""
    attempt: int
    """0 for the first attempt. Each retry or move adds 1."""
    choice: int
    detail: str
    """For a retry: the code of the error that led to it."""


class RequestDetail(RequestView):
    timeline: list[TimelineEntry]
    """Sorted by time."""

    @classmethod
    def of(cls, record: RequestRecord, now_s: float) -> RequestDetail:
        return cls(**_fields(record, now_s), timeline=_timeline(record))


def _fields(record: RequestRecord, now_s: float) -> dict[str, Any]:
    first = record.choices[0]
    return {
        "id": record.id,
        "model": record.model,
        "state": record.state,
        "prompt_tokens": record.num_prompt_tokens,
        "generated_tokens": record.num_generated_tokens,
        "choices": len(record.choices),
        "prefill_worker": first.prefill_worker,
        "decode_worker": first.decode_worker,
        "priority": record.priority,
        "key_name": record.client.api_key.name or None,
        "received_at": round(time.time() - (now_s - record.received_s), 3),
        "age_s": round(record.age_s(now_s), 6),
        "error": record.error,
        "error_message": record.error_message,
    }


def _timeline(record: RequestRecord) -> list[TimelineEntry]:
    start = record.received_s
    waited_s = None if record.admitted_s is None else record.admitted_s - start
    if waited_s is None and record.ended_s is not None:
        waited_s = record.ended_s - start
    events = [
        (0, TimelineEvent("received", start)),
        (0, TimelineEvent("queued", start, duration_s=waited_s)),
    ]
    events += [(i, event) for i, choice in enumerate(record.choices) for event in choice.events]
    return [
        TimelineEntry(
            name=event.name,
            at_s=round(event.at_s - start, 6),
            duration_s=None if event.duration_s is None else round(event.duration_s, 6),
            worker=event.worker,
            attempt=event.attempt,
            choice=i,
            detail=event.detail,
        )
        for i, event in sorted(events, key=lambda item: item[1].at_s)
    ]


MAX_LIMIT = 10_000

router = APIRouter()


@router.get("/requests")
async def list_requests(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 100
) -> RequestsView:
    """Lists requests in flight, then the last requests that have ended. Both parts begin with the newest
    request."""
    services = services_of(request)
    now_s = services.recent.now_s
    return RequestsView(requests=[RequestView.of(one, now_s) for one in services.requests.newest(limit)])


@router.get("/requests/{request_id}")
async def show_request(request: Request, request_id: str) -> RequestDetail:
    """Shows one request with its timeline."""
    services = services_of(request)
    return RequestDetail.of(_find(services, request_id), services.recent.now_s)


@router.post("/requests/{request_id}/abort")
async def abort_request(request: Request, request_id: str) -> RequestView:
    """Ends a request: its client gets an error with the code ``aborted``. A request that has ended is not
    changed."""
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
