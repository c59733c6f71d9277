"""Requests as the admin API shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from router.observe.choice_timeline import EventName, TimelineEvent
from router.observe.request_record import RequestRecord, RequestState

ENDED: frozenset[RequestState] = frozenset({"finished", "failed", "cancelled"})


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
    process: int
    """Index of the router process that serves the request. Two processes may have requests with the same
    id."""

    @classmethod
    def of(cls, record: RequestRecord, now_s: float, process: int) -> RequestView:
        return cls(**_fields(record, now_s, process))


def newest(requests: Iterable[RequestView], limit: int) -> list[RequestView]:
    """Return at most ``limit`` requests: those in flight, then those that have ended, the newest first."""
    return sorted(requests, key=lambda one: (one.state in ENDED, -one.received_at))[:limit]


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
    def of(cls, record: RequestRecord, now_s: float, process: int) -> RequestDetail:
        return cls(**_fields(record, now_s, process), timeline=_timeline(record))


def _fields(record: RequestRecord, now_s: float, process: int) -> dict[str, Any]:
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
        "process": process,
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
