"""Servers that come, go and drain while the router runs: by an operator's wish, or as their pods do."""

from __future__ import annotations

import asyncio
import logging

from router.fleet.links.decode_stream import DecodeStream
from router.fleet.links.server_link import AddedBy, PoolRole
from router.fleet.links.worker_watch import Worker
from router.fleet.server_pool import ServerPool
from wire.errors import ConflictError

log = logging.getLogger(__name__)


class Membership:
    """What the admin API and discovery do to the pool, each with a line in the log that says why."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool

    def has(self, worker: Worker) -> bool:
        return worker in self._pool.workers()

    def add(self, role: PoolRole, address: str, *, added_by: AddedBy, why: str) -> Worker:
        """It is used as soon as it answers. Raises :class:`ConflictError` if it is there."""
        worker = self._pool.add(role, address, added_by=added_by)
        _log(worker, "was added", why)
        return worker

    def remove(self, worker: Worker, *, why: str) -> None:
        """What is under way there ends there."""
        self._pool.remove(worker)
        _log(worker, "was removed", why)

    def pause(self, worker: Worker, *, why: str) -> None:
        """Nothing new goes there until :meth:`resume`; what is under way goes on. The server is not told."""
        worker.hold_back(why)
        _log(worker, "is paused", why)

    def resume(self, worker: Worker, *, why: str) -> None:
        worker.hold_back("")
        _log(worker, "is used again", why)

    async def set_draining(self, worker: Worker, is_draining: bool, *, why: str) -> bool:
        """Nothing new goes there from now on, or does again; the server tells all routers. False: it should
        have been told and did not answer. One that is out of reach is told once it appears.

        Raises :class:`ConflictError` for a server that will not take requests again.
        """
        if worker.drain.is_retired and not is_draining:
            raise ConflictError(
                f"worker {worker.worker_id} at {worker.address} drains for good: {worker.drain.why}"
            )
        worker.drain.wish(is_draining, lets_go=is_draining and self._can_let_go(worker))
        _log(worker, "drains" if is_draining else "serves", why)
        return not worker.is_connected or await worker.drain.tell()

    def retire(self, worker: Worker, *, why: str) -> asyncio.Task[bool]:
        """Drains it at once and for good; the task tells the server, as it is now and no later life of it."""
        worker.drain.retire(why, lets_go=self._can_let_go(worker))
        _log(worker, "drains", why)
        return asyncio.create_task(worker.drain.tell(), name=f"drain of {worker.address}")

    def _can_let_go(self, worker: Worker) -> bool:
        return isinstance(worker, DecodeStream) and self._pool.has_other_decode(worker)


def _log(worker: Worker, what: str, why: str) -> None:
    log.info("%s server %s %s: %s", worker.pool_role, worker.address, what, why)
