"""Operators' changes: first they are made, then they are saved, if there is a state file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from fastapi import Request

from router.admin.state_file import SavedChanges, SavedState, SavedWorker, StateFile
from router.config import LiveConfig
from router.fleet.links.server_drain import TIMEOUT_S
from router.fleet.links.server_link import PoolRole
from router.fleet.links.worker_watch import Worker
from router.fleet.pool_membership import Membership
from router.fleet.server_pool import ServerPool
from wire.errors import UnavailableError

log = logging.getLogger(__name__)

BY_OPERATOR = "asked for through the admin API"


class Changes:
    """Changes of the pool and of settings while the router runs."""

    def __init__(
        self,
        pool: ServerPool,
        membership: Membership,
        settings: LiveConfig,
        state_file: StateFile | None,
    ) -> None:
        self._pool = pool
        self._membership = membership
        self._settings = settings
        self._state_file = state_file

    @property
    def warning(self) -> str:
        """Why changes would not survive a restart of the router. Empty if they would survive, or if there is
        no state file."""
        return "" if self._state_file is None else self._state_file.warning

    def restore(self, saved: SavedChanges) -> None:
        """Bring the pool to where operators left it. The saved settings are already in the configuration."""
        for worker in saved.workers:
            self._restore(worker)

    def _restore(self, saved: SavedWorker) -> None:
        place = (saved.role, saved.address)
        worker = next((one for one in self._pool.workers() if (one.pool_role, one.address) == place), None)
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

    async def add_worker(self, role: PoolRole, address: str) -> Worker:
        """Add a server. Raises :class:`ConflictError` if the pool has it already."""
        worker = self._membership.add(role, address, added_by="api", why=BY_OPERATOR)
        await self._save(worker, "serving")
        return worker

    async def remove_worker(self, worker: Worker) -> None:
        self._membership.remove(worker, why=BY_OPERATOR)
        await self._save(worker, "removed")

    async def set_draining(self, worker: Worker, is_draining: bool) -> None:
        """Drain a server, or use it again. A server that is out of reach is told once it appears.

        Raises :class:`UnavailableError` if the server is connected but does not answer, and
        :class:`ConflictError` if a server that drains for good should be used again.
        """
        was_told = await self._membership.set_draining(worker, is_draining, why=BY_OPERATOR)
        await self._save(worker, "draining" if is_draining else "serving")
        if not was_told:
            what = "sends nothing there" if is_draining else "sends requests there again"
            raise UnavailableError.told(
                f"worker {worker.worker_id} at {worker.address} did not answer within {TIMEOUT_S:g} s: "
                f"this router {what}, but the worker and other routers do not know; ask again"
            )

    async def change_settings(self, values: Mapping[str, Any]) -> None:
        """Change settings. Raises :class:`InvalidRequestError` for values that can't work, and then changes
        none."""
        self._settings.change(values)
        log.info("settings were changed: %s", ", ".join(f"{name} = {values[name]}" for name in values))
        if self._state_file is not None:
            await self._state_file.save_settings(values)

    async def _save(self, worker: Worker, state: SavedState) -> None:
        """Save a server's state, unless the server is a pod: when the router starts again, another pod may
        have its address."""
        if self._state_file is not None and worker.added_by != "discovery":
            saved = SavedWorker(worker.pool_role, worker.address, state, worker.added_by)
            await self._state_file.save_worker(saved)


def changes_of(request: Request) -> Changes:
    return cast(Changes, request.app.state.changes)
