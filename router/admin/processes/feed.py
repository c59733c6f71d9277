"""What changes in one router process: its own events, for the admin API of this process and its siblings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress

from pydantic import BaseModel

from router.admin.views.config import ChangedConfigView, ConfigView
from router.admin.views.key import KeyView, key_views
from router.admin.views.model import ModelView, model_views
from router.admin.views.process import ProcessView
from router.admin.views.request import RequestView
from router.admin.views.stats import Counts
from router.admin.views.worker import WorkerView, worker_views
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


class Keys(BaseModel):
    keys: list[KeyView]


class Models(BaseModel):
    models: list[ModelView]


Event = tuple[str, BaseModel]
"""The name of an event and what it shows."""
KINDS: dict[str, type[BaseModel]] = {
    "counts": Counts,
    "config": ChangedConfigView,
    "process": ProcessView,
    "keys": Keys,
    "models": Models,
    "worker": WorkerView,
    "worker_removed": RemovedWorker,
    "request": RequestView,
}
"""What each event shows."""


class EventFeed:
    """Sends changes to subscribers. One task looks for changes; each subscriber has a queue. ``warning``
    returns why changes of operators would be lost."""

    def __init__(self, services: Services, warning: Callable[[], str]) -> None:
        self._services = services
        self._warning = warning
        self._subscribers: set[asyncio.Queue[list[Event] | None]] = set()
        self._has_subscribers = asyncio.Event()
        self._workers: dict[str, WorkerView] = {}
        self._states: dict[RequestRecord, RequestState] = {}
        self._num_ended = 0
        self._once_a_second: dict[str, BaseModel] = {}
        """What was last sent of what is compared once a second."""
        self._config: ChangedConfigView | None = None

    async def run(self) -> None:
        """Look for changes until the task is cancelled."""
        num_ticks = 0
        while True:
            await self._has_subscribers.wait()
            self._send(list(self._changes(has_second_passed=num_ticks % TICKS_A_SECOND == 0)))
            num_ticks += 1
            await asyncio.sleep(TICK_S)

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Yield events: first the present state, then each change. Ends when the feed is closed."""
        queue: asyncio.Queue[list[Event] | None] = asyncio.Queue(MAX_WAITING)
        if not self._subscribers:
            self._begin()
        queue.put_nowait(list(self._all()))
        self._subscribers.add(queue)
        self._has_subscribers.set()
        try:
            while (events_or_end := await queue.get()) is not None:
                yield events_or_end
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

    def _all(self) -> Iterable[Event]:
        services = self._services
        yield "counts", Counts.of(services)
        yield "config", self._config_view()
        yield from self._slow()
        for worker in worker_views(services):
            yield "worker", worker
        for record in services.requests.newest(MAX_REQUESTS_A_TICK):
            yield "request", self._request_view(record)

    def _changes(self, *, has_second_passed: bool) -> Iterable[Event]:
        if has_second_passed:
            yield "counts", Counts.of(self._services)
        if (config := self._config_view()) != self._config:
            self._config = config
            yield "config", config
        if has_second_passed:
            for name, view in self._slow():
                if view != self._once_a_second.get(name):
                    self._once_a_second[name] = view
                    yield name, view
        yield from self._changed_workers()
        changed = self._changed_requests()
        if has_second_passed:
            changed += self._decoding_besides(changed)
        for record in changed:
            yield "request", self._request_view(record)

    def _slow(self) -> Iterable[Event]:
        yield "process", ProcessView.of(self._services)
        yield "keys", Keys(keys=key_views(self._services))
        yield "models", Models(models=model_views(self._services))

    def _request_view(self, record: RequestRecord) -> RequestView:
        return RequestView.of(record, self._services.recent.now_s, self._services.process)

    def _config_view(self) -> ChangedConfigView:
        return ChangedConfigView.with_warning(ConfigView.of(self._services), self._warning(), [])

    def _changed_workers(self) -> Iterable[Event]:
        before = self._workers
        views = worker_views(self._services)
        self._workers = {view.id: view for view in views}
        for worker_id in before.keys() - self._workers.keys():
            yield "worker_removed", RemovedWorker(id=worker_id)
        for view in views:
            if view != before.get(view.id):
                yield "worker", view

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

    def _send(self, events: list[Event]) -> None:
        if not events:
            return
        for queue in list(self._subscribers):
            try:
                queue.put_nowait(events)
            except asyncio.QueueFull:
                self._end(queue)

    def _end(self, queue: asyncio.Queue[list[Event] | None]) -> None:
        while queue.full():
            with suppress(asyncio.QueueEmpty):
                queue.get_nowait()
        queue.put_nowait(None)
        self._leave(queue)

    def _leave(self, queue: asyncio.Queue[list[Event] | None]) -> None:
        self._subscribers.discard(queue)
        if not self._subscribers:
            self._has_subscribers.clear()


def encoded(name: str, view: BaseModel) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {view.model_dump_json()}\n\n".encode()
