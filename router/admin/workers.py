"""``/admin/v1/workers`` and ``/admin/v1/pools``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from router.admin.worker_view import PoolsView, Worker, WorkersView, WorkerView
from router.decode_stream import DecodeStream
from router.drain import TIMEOUT_S
from router.openai_errors import shown
from router.services import Services, services_of
from wire.errors import UnavailableError, UnknownIdError

router = APIRouter()


UNKNOWN = "GET /admin/v1/workers lists those that there are"


def worker_views(services: Services) -> list[WorkerView]:
    return [WorkerView.of(worker) for worker in services.pool.workers()]


@router.get("/workers")
async def list_workers(request: Request) -> WorkersView:
    """All servers that this router knows."""
    return WorkersView(workers=worker_views(services_of(request)))


@router.get("/pools")
async def list_pools(request: Request) -> PoolsView:
    """Sizes and totals for each role and model."""
    return PoolsView.of(worker_views(services_of(request)))


@router.post("/workers/{worker_id}/drain")
async def drain(request: Request, worker_id: str) -> WorkerView:
    """Sends no new requests there, from any router. What a decode server generates goes on at another one,
    without a gap or a repeated token; where there is no other, and on a prefill server, it ends where it is.

    Draining lasts until it is taken back, over restarts of the server too. Asked again, a decode server lets
    go what has come to it meanwhile.
    """
    services = services_of(request)
    worker = _find(services, worker_id)
    lets_go = isinstance(worker, DecodeStream) and services.pool.has_other_decode(worker)
    return await _set_draining(worker, True, lets_go=lets_go)


@router.post("/workers/{worker_id}/undrain")
async def undrain(request: Request, worker_id: str) -> WorkerView:
    """Requests may be sent there again."""
    worker = _find(services_of(request), worker_id)
    return await _set_draining(worker, False)


async def _set_draining(worker: Worker, is_draining: bool, *, lets_go: bool = False) -> WorkerView:
    """One that is out of reach is told once it appears."""
    worker.drain.wish(is_draining)
    if worker.info is not None and not await worker.drain.tell(lets_go=lets_go):
        what = "sends nothing there" if is_draining else "sends requests there again"
        raise UnavailableError(
            f"worker {worker.worker_id} at {worker.address} did not answer within {TIMEOUT_S:g} s: "
            f"this router {what}, but the worker and other routers do not know; ask again"
        )
    return WorkerView.of(worker)


def _find(services: Services, worker_id: str) -> Worker:
    found = next((one for one in services.pool.workers() if one.worker_id == worker_id), None)
    if found is None:
        raise UnknownIdError(f"there is no worker {shown(worker_id)}: {UNKNOWN}")
    return found
