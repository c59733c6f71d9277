"""``/admin/v1/workers`` and ``/admin/v1/pools``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from router.admin.audited_call import note_attempt, note_change
from router.admin.changes import changes_of
from router.admin.processes.overview import processes_of
from router.admin.views.missing import MissingProcess
from router.admin.views.pool import PoolsView
from router.admin.views.worker import ChangedWorkerView, WorkersView, WorkerView
from router.config import check_address
from router.fleet.links.server_link import PoolRole
from router.fleet.links.worker_watch import Worker
from router.http.bodies.json_body import body_schema, read_json
from router.http.openai_errors import shown
from router.serving.services import Services, services_of
from wire.errors import ConfigError, InvalidRequestError, UnknownIdError
from wire.messages.handoff import Role

router = APIRouter()


class NewWorker(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    address: str
    """``host:port`` of the server's gRPC port."""
    role: Role
    """What the server does here. A server that does both takes requests like a decode server."""


@router.get("/workers")
async def list_workers(request: Request) -> WorkersView:
    """Lists all servers that this router knows."""
    found = await processes_of(request).look()
    return WorkersView(workers=found.workers, missing=found.missing)


@router.get("/pools")
async def list_pools(request: Request) -> PoolsView:
    """Shows sizes and totals for each role and model. If no request can be served, says why."""
    return (await processes_of(request).look()).pools


@router.post("/workers", status_code=201, openapi_extra=body_schema(NewWorker))
async def add_worker(request: Request) -> ChangedWorkerView:
    """Adds a server. A server that is not up yet is used as soon as it answers; until then its `problem` says
    why it is not used. A server that is up must have the given role, and serve a model of this router."""
    body = await read_json(request, NewWorker)
    note_attempt(request, role=body.role, address=body.address)
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
    added = await changes_of(request).add_worker(role, body.address)
    note_change(request, before=None, after=_state_of(added[0]))
    return await _changed(request, *added)


@router.delete("/workers/{worker_id}")
async def remove_worker(request: Request, worker_id: str) -> ChangedWorkerView:
    """Removes a server. The server still finishes its requests under way. It is not told that it was removed,
    and keeps running."""
    worker = _find(services_of(request), worker_id)
    note_change(request, before=_state_of(worker), after=None)
    return await _changed(request, worker, await changes_of(request).remove_worker(worker))


@router.post("/workers/{worker_id}/drain")
async def drain(request: Request, worker_id: str) -> ChangedWorkerView:
    """Stops new requests to a server, from all routers. Running answers of a decode server continue on
    another decode server, without a gap or a repeated token. If there is no other decode server, the server
    itself finishes its requests. A prefill server always does.

    Draining lasts until it is undone, even over restarts of the server. If a decode server is drained again,
    it also gives away requests that have arrived meanwhile.
    """
    return await _drained(request, worker_id, True)


@router.post("/workers/{worker_id}/undrain")
async def undrain(request: Request, worker_id: str) -> ChangedWorkerView:
    """Lets requests be sent to a server again."""
    return await _drained(request, worker_id, False)


async def _drained(request: Request, worker_id: str, is_draining: bool) -> ChangedWorkerView:
    worker = _find(services_of(request), worker_id)
    before = _state_of(worker)
    note_change(request, before=before, after=before | {"draining": is_draining})
    return await _changed(request, worker, await changes_of(request).set_draining(worker, is_draining))


def _state_of(worker: Worker) -> dict[str, object]:
    """Return what the audit log tells of a server."""
    return {"role": worker.pool_role, "address": worker.address, "draining": worker.drain.is_draining}


async def _changed(request: Request, worker: Worker, missing: list[MissingProcess]) -> ChangedWorkerView:
    """Return the server as it is after a change that the processes in ``missing`` do not know."""
    shown = (await processes_of(request).look()).workers
    view = next((one for one in shown if one.id == worker.worker_id), None)
    if view is None:  # it was removed
        view = WorkerView.of(worker, services_of(request).recent)
    return ChangedWorkerView.with_warning(view, changes_of(request).warning_of(missing), missing)


def _find(services: Services, worker_id: str) -> Worker:
    found = next((one for one in services.pool.workers() if one.worker_id == worker_id), None)
    if found is None:
        raise UnknownIdError(
            f"there is no worker {shown(worker_id)}: GET /admin/v1/workers lists all workers"
        )
    return found
