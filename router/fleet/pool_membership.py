"""Adds, removes and drains servers while the router runs: because an operator wants it, or because pods
appear and disappear."""

from __future__ import annotations

import asyncio
import logging

from router.fleet.links.decode_stream import DecodeStream
from router.fleet.links.server_link import AddedBy, PoolRole
from router.fleet.links.worker_watch import Worker
from router.fleet.server_pool import ServerPool
from router.policies.location import NOWHERE, Location
from wire.errors import ConflictError

log = logging.getLogger(__name__)


class Membership:
    """The changes that the admin API and discovery make to the pool. Each change is logged with its
    reason."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool

    def has(self, worker: Worker) -> bool:
        return worker in self._pool.workers()

    def add(
        self, role: PoolRole, address: str, *, added_by: AddedBy, why: str, location: Location = NOWHERE
    ) -> Worker:
        """Add a server, which is used as soon as it answers. Raises :class:`ConflictError` if the pool has it
        already."""
        worker = self._pool.add(role, address, added_by=added_by, location=location)
        _log(worker, "was added", why)
        return worker

    def remove(self, worker: Worker, *, why: str) -> None:
        """Remove a server. It still finishes its requests under way."""
        self._pool.remove(worker)
        _log(worker, "was removed", why)

    def pause(self, worker: Worker, *, why: str) -> None:
        """Send nothing new to the server until :meth:`resume`. Requests under way continue. The server is not
        told."""
        worker.hold_back(why)
        _log(worker, "is paused", why)

    def resume(self, worker: Worker, *, why: str) -> None:
        worker.hold_back("")
        _log(worker, "is used again", why)

    async def set_draining(self, worker: Worker, is_draining: bool, *, why: str) -> bool:
        """Send nothing new to the server from now on, or use it again. The server passes this on to all
        routers. A server that can't be reached now is told once it appears. Return False if the server is
        there and did not answer.

        Raises :class:`ConflictError` for a server that drains for good.
        """
        if worker.drain.is_retired and not is_draining:
            raise ConflictError(
                f"worker {worker.worker_id} at {worker.address} drains for good: {worker.drain.why}"
            )
        heirs = self._pool.heirs(worker) if is_draining else ()
        worker.drain.wish(is_draining, lets_go=is_draining and self._can_let_go(worker), heirs=heirs)
        _log(worker, "drains" if is_draining else "serves", why)
        return not worker.is_connected or await worker.drain.tell()

    def retire(self, worker: Worker, *, why: str) -> asyncio.Task[bool]:
        """Drain the server at once and for good. The returned task tells the server's present incarnation,
        and no later one."""
        worker.drain.retire(why, lets_go=self._can_let_go(worker), heirs=self._pool.heirs(worker))
        _log(worker, "drains", why)
        return asyncio.create_task(worker.drain.tell(), name=f"drain of {worker.address}")

    def _can_let_go(self, worker: Worker) -> bool:
        return isinstance(worker, DecodeStream) and self._pool.has_other_decode(worker)


def _log(worker: Worker, what: str, why: str) -> None:
    log.info("%s server %s %s: %s", worker.pool_role, worker.address, what, why)
