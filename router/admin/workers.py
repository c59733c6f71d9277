"""``/admin/v1/workers`` and ``/admin/v1/pools``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from router.admin.changed_view import ChangedWorkerView
from router.admin.changes import changes_of
from router.admin.worker_view import PoolsView, WorkersView, WorkerView
from router.config import check_address
from router.json_body import body_schema, read_json
from router.openai_errors import shown
from router.services import Services, services_of
from router.worker_id import PoolRole
from router.worker_watch import Worker
from wire.errors import ConfigError, InvalidRequestError, UnknownIdError
from wire.handoff import Role

router = APIRouter()


class NewWorker(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    address: str
    """``host:port`` of its gRPC."""
    role: Role
    """What it is to do here; a server that does both takes requests like a decode server."""


def worker_views(services: Services) -> list[WorkerView]:
    return [WorkerView.of(worker) for worker in services.pool.workers()]


@router.get("/workers")
async def list_workers(request: Request) -> WorkersView:
    """All servers that this router knows."""
    return WorkersView(workers=worker_views(services_of(request)))


@router.get("/pools")
async def list_pools(request: Request) -> PoolsView:
    """Sizes and totals for each role and model, and why no request can be served, if none can."""
    services = services_of(request)
    return PoolsView.of(worker_views(services), services.absence)


@router.post("/workers", status_code=201, openapi_extra=body_schema(NewWorker))
async def add_worker(request: Request) -> ChangedWorkerView:
    """Adds a server. One that is not up yet is used as soon as it answers; until then its `problem` says why
    it is not. One that is up must be of that role, and serve a model of this router."""
    body = await read_json(request, NewWorker)
    try:
        check_address(body.address)
    except ConfigError as error:
        raise InvalidRequestError(error.message, param="address") from error
    role: PoolRole = "prefill" if body.role == "prefill" else "decode"
    try:
        await services_of(request).pool.examine(role, body.address)
    except ConfigError as error:
        message = f"{body.address} was not added as a {body.role} server: {error.message}"
        raise InvalidRequestError(message, param="address") from error
    return _changed(request, await changes_of(request).add_worker(role, body.address))


@router.delete("/workers/{worker_id}")
async def remove_worker(request: Request, worker_id: str) -> ChangedWorkerView:
    """Removes a server. What is under way there ends there; the server itself is not told, and runs on."""
    worker = _find(services_of(request), worker_id)
    await changes_of(request).remove_worker(worker)
    return _changed(request, worker)


@router.post("/workers/{worker_id}/drain")
async def drain(request: Request, worker_id: str) -> ChangedWorkerView:
    """Sends no new requests there, from any router. What a decode server generates goes on at another one,
    without a gap or a repeated token; where there is no other, and on a prefill server, it ends where it is.

    Draining lasts until it is taken back, over restarts of the server too. Asked again, a decode server lets
    go what has come to it meanwhile.
    """
    worker = _find(services_of(request), worker_id)
    await changes_of(request).set_draining(worker, True)
    return _changed(request, worker)


@router.post("/workers/{worker_id}/undrain")
async def undrain(request: Request, worker_id: str) -> ChangedWorkerView:
    """Requests may be sent there again."""
    worker = _find(services_of(request), worker_id)
    await changes_of(request).set_draining(worker, False)
    return _changed(request, worker)


def _changed(request: Request, worker: Worker) -> ChangedWorkerView:
    return ChangedWorkerView.with_warning(WorkerView.of(worker), changes_of(request).warning)


def _find(services: Services, worker_id: str) -> Worker:
    found = next((one for one in services.pool.workers() if one.worker_id == worker_id), None)
    if found is None:
        raise UnknownIdError(
            f"there is no worker {shown(worker_id)}: GET /admin/v1/workers lists those that there are"
        )
    return found
