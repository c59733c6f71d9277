"""``GET /admin/v1/events``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from router.admin.changes import Changes
from router.admin.config import ChangedConfigView, ConfigView
from router.admin.requests import RequestView
from router.admin.stats import StatsView
from router.admin.workers import worker_views
from router.observe.request_record import RequestRecord, RequestState
from router.serving.services import Services

TICK_S = 0.25
TICKS_A_SECOND = 4
MAX_WAITING = 2048
"""Maximum number of messages that wait for one subscriber. A subscriber that reads too slowly is
disconnected, and may connect again."""
MAX_REQUESTS_A_TICK = 256
"""Maximum number of changed requests that are sent at a time. If more have changed, the newest are sent."""
MAX_DECODING_A_SECOND = 100
"""Maximum number of decoding requests that are sent once a second, so that their tokens can be watched. The
newest are sent."""


class RemovedWorker(BaseModel):
    id: str


class EventFeed:
    """Sends changes to subscribers. One task looks for changes; each subscriber has a queue."""

    def __init__(self, services: Services, changes: Changes) -> None:
        self._services = services
        self._changes_of_operators = changes
        self._subscribers: set[asyncio.Queue[bytes | None]] = set()
        self._has_subscribers = asyncio.Event()
        self._workers: dict[str, BaseModel] = {}
        self._states: dict[RequestRecord, RequestState] = {}
        self._num_ended = 0
        self._config: ChangedConfigView | None = None

    async def run(self) -> None:
        """Look for changes until the task is cancelled."""
        num_ticks = 0
        while True:
            await self._has_subscribers.wait()
            self._send(self._changes(has_second_passed=num_ticks % TICKS_A_SECOND == 0))
            num_ticks += 1
            await asyncio.sleep(TICK_S)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: first the present state, then each change. Ends when the feed is
        closed."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)
        if not self._subscribers:
            self._begin()
        for data in self._all():
            queue.put_nowait(data)
        self._subscribers.add(queue)
        self._has_subscribers.set()
        try:
            while (data_or_end := await queue.get()) is not None:
                yield data_or_end
        finally:
            self._leave(queue)

    def close(self) -> None:
        """End all subscriptions."""
        for queue in list(self._subscribers):
            self._end(queue)

    def _begin(self) -> None:
        """Remember the present state. Later changes are found by comparison with it."""
        self._workers = {view.id: view for view in worker_views(self._services)}
        self._states = {record: record.state for record in self._services.requests.in_flight()}
        self._num_ended = self._services.requests.num_ended
        self._config = self._config_view()

    def _all(self) -> Iterable[bytes]:
        services = self._services
        yield event("stats", StatsView.of(services))
        yield event("config", self._config_view())
        for worker in worker_views(services):
            yield event("worker", worker)
        for record in services.requests.newest(MAX_REQUESTS_A_TICK):
            yield event("request", RequestView.of(record, services.recent.now_s))

    def _changes(self, *, has_second_passed: bool) -> Iterable[bytes]:
        services = self._services
        if has_second_passed:
            yield event("stats", StatsView.of(services))
        if (config := self._config_view()) != self._config:
            self._config = config
            yield event("config", config)
        yield from self._changed_workers()
        changed = self._changed_requests()
        if has_second_passed:
            changed += self._decoding_besides(changed)
        for record in changed:
            yield event("request", RequestView.of(record, services.recent.now_s))

    def _config_view(self) -> ChangedConfigView:
        warning = self._changes_of_operators.warning
        return ChangedConfigView.with_warning(ConfigView.of(self._services), warning)

    def _changed_workers(self) -> Iterable[bytes]:
        before = self._workers
        views = worker_views(self._services)
        self._workers = {view.id: view for view in views}
        for worker_id in before.keys() - self._workers.keys():
            yield event("worker_removed", RemovedWorker(id=worker_id))
        for view in views:
            if view != before.get(view.id):
                yield event("worker", view)

    def _changed_requests(self) -> list[RequestRecord]:
        requests = self._services.requests
        ended = requests.last_ended(requests.num_ended - self._num_ended)
        self._num_ended = requests.num_ended
        before, self._states = self._states, {record: record.state for record in requests.in_flight()}
        changed = [record for record, state in self._states.items() if before.get(record) != state]
        return [*changed, *reversed(ended)][-MAX_REQUESTS_A_TICK:]

    def _decoding_besides(self, changed: list[RequestRecord]) -> list[RequestRecord]:
        """Return the newest requests that decode, without those in ``changed``, which are sent anyway."""
        decoding = [record for record, state in self._states.items() if state == "decode"]
        told = set(changed)
        return [record for record in decoding[-MAX_DECODING_A_SECOND:] if record not in told]

    def _send(self, events: Iterable[bytes]) -> None:
        data = b"".join(events)
        if not data:
            return
        for queue in list(self._subscribers):
            try:
                queue.put_nowait(data)
            except asyncio.QueueFull:
                self._end(queue)

    def _end(self, queue: asyncio.Queue[bytes | None]) -> None:
        while queue.full():
            with suppress(asyncio.QueueEmpty):
                queue.get_nowait()
        queue.put_nowait(None)
        self._leave(queue)

    def _leave(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._subscribers.discard(queue)
        if not self._subscribers:
            self._has_subscribers.clear()


def event(name: str, view: BaseModel) -> bytes:
    return f"event: {name}\ndata: {view.model_dump_json()}\n\n".encode()


router = APIRouter()

DESCRIPTION = (
    "Server-sent events `worker`, `request`, `config` and `stats`, with the objects that the addresses of "
    "those names show: first everything as it is, then what changes; `stats`, and requests that decode, once "
    "a second. An event `worker_removed` names a worker that was removed."
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
