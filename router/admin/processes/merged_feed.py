"""Merges the events of all router processes on this port into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import BaseModel

from router.admin.processes.feed import KINDS, Event, EventFeed, Keys, Models, RemovedWorker
from router.admin.processes.overview import joined
from router.admin.views.config import ChangedConfigView
from router.admin.views.key import merged_keys
from router.admin.views.missing import MissingProcess
from router.admin.views.model import merged_models
from router.admin.views.process import ProcessesView, ProcessView
from router.admin.views.stats import Counts, StatsView
from router.admin.views.worker import WorkerView, merged_worker
from router.background import cancel_and_wait

if TYPE_CHECKING:
    from router.admin.processes.channel import Siblings

RETRY_S = 1.0
"""Time between two attempts to follow a sibling that does not answer."""
MAX_WAITING = 64
"""Maximum number of batches of events that wait for one reader. Then no more is read from the processes.
Their feeds end subscriptions that are not read."""

View = TypeVar("View", bound=BaseModel)


class MergedEvents:
    """What one reader has been shown: the newest views of each process, merged.

    Each reader has an object of its own, since it may have begun while a process was missing.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        self._latest: dict[int, dict[str, BaseModel]] = {}
        """Each process's newest event of each name, except requests and workers."""
        self._workers: dict[int, dict[str, WorkerView]] = {}
        self._shown: dict[str, WorkerView] = {}
        self._shown_once: dict[str, BaseModel] = {}
        self._missing: dict[int, str] = {}

    def begun(self, process: int) -> None:
        """Note that a process is about to send everything as it is."""
        self._latest[process], self._workers[process] = {}, {}
        self._missing.pop(process, None)

    def lost(self, process: int, problem: str) -> list[Event]:
        """Note that a process does not answer, and return what changes by that."""
        self._latest.pop(process, None)
        ids = self._workers.pop(process, {}).keys()
        self._missing[process] = problem
        return [*self._processes(), *(event for worker_id in ids for event in self._worker(worker_id))]

    def take(self, process: int, events: Iterable[Event]) -> list[Event]:
        """Take events of one process. Return the events of all processes that follow from them."""
        merged: list[Event] = []
        changed: dict[str, None] = {}
        for name, view in events:
            if isinstance(view, WorkerView):
                self._workers[process][view.id] = view
                changed[view.id] = None
            elif isinstance(view, RemovedWorker):
                self._workers[process].pop(view.id, None)
                changed[view.id] = None
            elif name == "request":
                merged.append((name, view))
            else:
                self._latest[process][name] = view
                merged += self._merged(process, name)
        return merged + [event for worker_id in changed for event in self._worker(worker_id)]

    def _merged(self, process: int, name: str) -> list[Event]:
        if name == "counts":  # once a second, at the own process's pace
            if process != self._own:
                return []
            return [("stats", StatsView.of(self._of("counts", Counts), self._missing_views))]
        if name == "config":
            configs = self._of("config", ChangedConfigView)
            own = self._latest.get(self._own, {}).get("config", configs[0])
            warning = joined([config.warning for config in configs])
            return self._once("config", cast(ChangedConfigView, own).model_copy(update={"warning": warning}))
        if name == "keys":
            found = self._of("keys", Keys)
            return self._once("keys", Keys(keys=merged_keys(key for one in found for key in one.keys)))
        if name == "models":
            models = self._of("models", Models)
            return self._once("models", Models(models=merged_models(m for one in models for m in one.models)))
        return self._processes()

    def _processes(self) -> list[Event]:
        views = sorted(self._of("process", ProcessView), key=lambda view: view.process)
        return self._once("processes", ProcessesView(processes=views, missing=self._missing_views))

    def _worker(self, worker_id: str) -> list[Event]:
        """Return the event by which a server looks as the processes see it now."""
        order = sorted(self._workers, key=lambda process: process != self._own)
        views = [view for one in order if (view := self._workers[one].get(worker_id)) is not None]
        if not views:
            was_shown = self._shown.pop(worker_id, None) is not None
            return [("worker_removed", RemovedWorker(id=worker_id))] if was_shown else []
        view = merged_worker(views)
        if view == self._shown.get(worker_id):
            return []
        self._shown[worker_id] = view
        return [("worker", view)]

    def _once(self, name: str, view: BaseModel) -> list[Event]:
        """Return an event, unless the reader has seen the same."""
        if self._shown_once.get(name) == view:
            return []
        self._shown_once[name] = view
        return [(name, view)]

    def _of(self, name: str, kind: type[View]) -> list[View]:
        order = sorted(self._latest, key=lambda process: process != self._own)
        return [view for one in order if isinstance(view := self._latest[one].get(name), kind)]

    @property
    def _missing_views(self) -> list[MissingProcess]:
        return [MissingProcess(process=i, problem=why) for i, why in sorted(self._missing.items())]


Arrival = tuple[int, list[Event] | str | None]
"""From which process; and its events, or why there are none, or None: it begins anew."""


async def merged_events(
    own: int, feed: EventFeed, siblings: Siblings | None
) -> AsyncGenerator[list[Event], None]:
    """Yield the events of all processes: first everything as it is, then each change. Ends with the own
    feed."""
    arrivals: asyncio.Queue[Arrival | None] = asyncio.Queue(MAX_WAITING)
    tasks = [asyncio.create_task(_follow_own(own, feed, arrivals), name="own events")]
    if siblings is not None:
        tasks += [
            asyncio.create_task(_follow(process, siblings, arrivals), name=f"events of process {process}")
            for process in siblings.ports
        ]
    merged = MergedEvents(own)
    try:
        while (arrival := await arrivals.get()) is not None:
            process, what = arrival
            if what is None:
                merged.begun(process)
            elif isinstance(what, str):
                yield merged.lost(process, what)
            else:
                yield merged.take(process, what)
    finally:
        await cancel_and_wait(*tasks)


async def _follow_own(own: int, feed: EventFeed, arrivals: asyncio.Queue[Arrival | None]) -> None:
    await arrivals.put((own, None))
    async for events in feed.events():
        await arrivals.put((own, events))
    await arrivals.put(None)


async def _follow(process: int, siblings: Siblings, arrivals: asyncio.Queue[Arrival | None]) -> None:
    from router.admin.processes.channel import SiblingError

    while True:
        await arrivals.put((process, None))
        try:
            async for event in _parsed(siblings.events(process)):
                await arrivals.put((process, [event]))
        except SiblingError as error:
            await arrivals.put((process, str(error)))
        await asyncio.sleep(RETRY_S)


async def _parsed(events: AsyncIterator[tuple[str, str]]) -> AsyncIterator[Event]:
    async for name, data in events:
        yield name, KINDS[name].model_validate_json(data)
