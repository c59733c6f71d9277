"""Operators' changes: first they are made, then they are saved, if there is a state file, and told to the
other router processes on this port."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from fastapi import Request
from pydantic import BaseModel

from router.admin.ledger import Entry, Ledger
from router.admin.state_file import SavedChanges, SavedState, SavedWorker, StateFile
from router.admin.views.missing import MissingProcess, in_words
from router.background import cancel_and_wait
from router.config import LiveConfig
from router.fleet.links.server_drain import TIMEOUT_S
from router.fleet.links.server_link import PoolRole
from router.fleet.links.worker_watch import Worker
from router.fleet.pool_membership import Membership
from router.fleet.server_pool import ServerPool
from wire.errors import ConflictError, InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    from router.admin.processes.channel import Siblings

log = logging.getLogger(__name__)

BY_OPERATOR = "asked for through the admin API"
BY_SIBLING = "asked for through the admin API, at another process of this router"
CATCH_UP_INTERVAL_S = 2.0
"""Time between two questions for changes that this process has missed, for example while it was frozen."""


class Entries(BaseModel):
    """Changes on their way from one process to another."""

    entries: list[Entry]


class Stamps(BaseModel):
    """What a process knows: the stamps of its ledger."""

    stamps: dict[str, int]


class Changes:
    """Changes of the pool and of settings while the router runs.

    With several processes, each change has a stamp, and the newer one of two changes holds in all processes.
    A process that takes over a change tells the server of it, too. So the last thing that a server is told by
    any process is the change that holds.
    """

    def __init__(
        self,
        pool: ServerPool,
        membership: Membership,
        settings: LiveConfig,
        state_file: StateFile | None,
        ledger: Ledger,
        siblings: Siblings | None = None,
    ) -> None:
        self._pool = pool
        self._membership = membership
        self._settings = settings
        self._state_file = state_file
        self._ledger = ledger
        self._siblings = siblings
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def warning(self) -> str:
        """Why changes would not survive a restart of the router. Empty if they would survive, or if there is
        no state file."""
        return "" if self._state_file is None else self._state_file.warning

    def warning_of(self, missing: list[MissingProcess]) -> str:
        """Return the warning for a change that these processes do not know yet. Empty if there is none."""
        late = f"{in_words(missing)}: it gets the change when it answers again" if missing else ""
        return "; ".join(filter(None, (self.warning, late)))

    async def close(self) -> None:
        await cancel_and_wait(*self._telling)

    # --- changes of the past, and of other processes ---------------------------------------------------

    def restore(self, saved: SavedChanges) -> None:
        """Bring the pool to where operators left it. The saved settings are already in the configuration."""
        self._ledger.take(saved.entries)
        for worker in saved.workers:
            self._restore(worker)

    def _restore(self, saved: SavedWorker) -> None:
        place = (saved.role, saved.address)
        worker = self._find(*place)
        if saved.state == "removed":
            if worker is not None:
                log.info("%s server %s was removed through the admin API and stays removed", *place)
                self._pool.remove(worker)
            return
        if worker is None:
            if saved.added_by != "api":
                return
            log.info("%s server %s was added through the admin API", *place)
            worker = self._pool.add(*place, added_by="api")
        if saved.state == "draining":
            log.info("%s server %s drains as before", *place)
            worker.drain.wish(True)

    async def catch_up(self, process: int | None = None) -> None:
        """Take over what ``process`` knows and this process does not; by default, what any sibling knows."""
        if self._siblings is None:
            return
        known = Stamps(stamps=self._ledger.stamps).model_dump()
        if process is None:
            told, _ = await self._siblings.ask_all("POST", "/ledger/newer", Entries, known)
            answers = list(told.values())
        else:
            answer = await self._siblings.ask(process, "POST", "/ledger/newer", Entries, known)
            answers = [] if answer is None else [answer]
        await self.take_over(entry for answer in answers for entry in answer.entries)

    async def keep_catching_up(self) -> None:
        """Ask one sibling after the other, in random order, until the task is cancelled."""
        from router.admin.processes.channel import SiblingError

        assert self._siblings is not None
        while True:
            await asyncio.sleep(CATCH_UP_INTERVAL_S)
            try:
                await self.catch_up(random.choice(list(self._siblings.ports)))
            except SiblingError as error:
                log.debug("a sibling %s", error)

    def newer_than(self, stamps: dict[str, int]) -> list[Entry]:
        return self._ledger.newer_than(stamps)

    async def take_over(self, entries: Iterable[Entry]) -> None:
        """Make the changes that other processes have made, as far as they are newer than what is known
        here."""
        entries = list(entries)
        of_pods = [entry for entry in entries if _is_of_pod(entry)]  # they are told once and not kept
        newer = self._ledger.take(entry for entry in entries if not _is_of_pod(entry))
        self._take_settings({one.key[0]: one.values[0] for one in newer if one.table == "settings"})
        for entry in (*newer, *of_pods):
            if entry.table == "workers":
                self._take_worker(*entry.key, *entry.values)  # type: ignore[arg-type]
        if self._state_file is not None and newer:
            await self._state_file.save(newer)

    def _take_settings(self, values: Mapping[str, Any]) -> None:
        changed = {
            name: value
            for name, value in values.items()
            if getattr(self._settings.current, name, value) != value
        }
        if not changed:
            return
        try:
            self._settings.change(changed)
        except InvalidRequestError as error:
            log.error("another process of this router has other settings: %s", error.message)
        else:
            _log_settings(changed, BY_SIBLING)

    def _take_worker(self, role: PoolRole, address: str, state: SavedState, added_by: str) -> None:
        worker = self._find(role, address)
        if state == "removed":
            if worker is not None:
                self._membership.remove(worker, why=BY_SIBLING)
            return
        if worker is None:
            if added_by != "api":
                return
            worker = self._membership.add(role, address, added_by="api", why=BY_SIBLING)
        if state == "draining" or worker.drain.is_draining:
            task = asyncio.create_task(self._tell(worker, state == "draining"))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, worker: Worker, is_draining: bool) -> None:
        try:
            await self._membership.set_draining(worker, is_draining, why=BY_SIBLING)
        except ConflictError as error:
            log.warning("%s", error.message)

    # --- changes that this process is asked for --------------------------------------------------------

    async def add_worker(self, role: PoolRole, address: str) -> tuple[Worker, list[MissingProcess]]:
        """Add a server. Raises :class:`ConflictError` if the pool has it already. This and the other changes
        return the processes that could not be told."""
        worker = self._membership.add(role, address, added_by="api", why=BY_OPERATOR)
        return worker, await self._spread([self._noted(worker, "serving")])

    async def remove_worker(self, worker: Worker) -> list[MissingProcess]:
        self._membership.remove(worker, why=BY_OPERATOR)
        return await self._spread([self._noted(worker, "removed")])

    async def set_draining(self, worker: Worker, is_draining: bool) -> list[MissingProcess]:
        """Drain a server, or use it again. A server that is out of reach is told once it appears.

        Raises :class:`UnavailableError` if the server is connected but does not answer as it should, and
        :class:`ConflictError` if a server that drains for good should be used again.
        """
        may_change = is_draining or not worker.drain.is_retired
        # Noted before the server is told: a change that another process makes meanwhile is the newer one.
        entries = [self._noted(worker, "draining" if is_draining else "serving")] if may_change else []
        was_told = await self._membership.set_draining(worker, is_draining, why=BY_OPERATOR)
        missing = await self._spread(entries)
        if not was_told:
            what = "sends nothing there" if is_draining else "sends requests there again"
            raise UnavailableError.told(
                f"worker {worker.worker_id} at {worker.address} did not answer within "
                f"{TIMEOUT_S:g} s, or refused: "
                f"this router {what}, but the worker and other routers do not know; ask again"
            )
        return missing

    async def change_settings(self, values: Mapping[str, Any]) -> list[MissingProcess]:
        """Change settings. Raises :class:`InvalidRequestError` for values that can't work, and then changes
        none."""
        self._settings.change(values)
        _log_settings(values, BY_OPERATOR)
        stamp = self._ledger.stamp()  # the same for all: of two changes at a time, one wins everywhere
        entries = [
            Entry(table="settings", key=(name,), values=(value,), stamp=stamp)
            for name, value in values.items()
        ]
        self._ledger.take(entries)
        return await self._spread(entries)

    def _noted(self, worker: Worker, state: SavedState) -> Entry:
        entry = Entry(
            table="workers",
            key=(worker.pool_role, worker.address),
            values=(state, worker.added_by),
            stamp=self._ledger.stamp(),
        )
        if not _is_of_pod(entry):
            self._ledger.take([entry])
        return entry

    async def _spread(self, entries: list[Entry]) -> list[MissingProcess]:
        """Save changes and tell the other processes. Return those that could not be told."""
        kept = [entry for entry in entries if not _is_of_pod(entry)]
        if self._state_file is not None and kept:
            await self._state_file.save(kept)
        if self._siblings is None or not entries:
            return []
        body = Entries(entries=entries).model_dump()
        answers, missing = await self._siblings.ask_all("POST", "/ledger", Entries, body)
        await self.take_over(entry for answer in answers.values() for entry in answer.entries)
        return missing

    def _find(self, role: str, address: str) -> Worker | None:
        workers = self._pool.workers()
        return next((one for one in workers if (one.pool_role, one.address) == (role, address)), None)


def _is_of_pod(entry: Entry) -> bool:
    """Return whether a change is of a server that is a pod. It is not kept: after a restart, another pod may
    have the address."""
    return entry.table == "workers" and entry.values[1] == "discovery"


def _log_settings(values: Mapping[str, Any], why: str) -> None:
    told = ", ".join(f"{name} = {value}" for name, value in values.items())
    log.info("settings were changed: %s: %s", told, why)


def changes_of(request: Request) -> Changes:
    return cast(Changes, request.app.state.changes)
