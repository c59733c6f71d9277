"""``/admin/v1/workers`` and ``/admin/v1/pools``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from router.admin.changes import changes_of
from router.config import check_address
from router.fleet.absence import Absence
from router.fleet.links.circuit_breaker import BreakerState
from router.fleet.links.server_link import AddedBy, PoolRole
from router.fleet.links.worker_watch import Worker
from router.http.bodies.json_body import body_schema, read_json
from router.http.openai_errors import shown
from router.serving.services import Services, services_of
from wire.errors import ConfigError, InvalidRequestError, UnknownIdError
from wire.messages.generation import ServerStats
from wire.messages.handoff import Role

WorkerState = Literal["serving", "draining", "drained", "unreachable"]


class WorkerView(BaseModel):
    """One server as this router knows it. The router asks for the server's stats every two seconds, and more
    often while the server has requests of this router."""

    id: str
    address: str
    role: Role
    model: str | None
    """The model that the server reports. Null until the server has been reached."""
    state: WorkerState
    draining: bool
    """Whether the server was asked to take no new requests. It may be reachable or not."""
    breaker: BreakerState
    requests: int
    """Requests of this router that are under way there."""
    queued_tokens: int
    """Tokens of prompts that a new request would wait for."""
    incarnation: str | None
    problem: str
    """Why the server is not in use. Empty if it is."""
    stats: ServerStats | None
    added_by: AddedBy

    @classmethod
    def of(cls, worker: Worker) -> WorkerView:
        info, known = worker.info, worker.assignments
        return cls(
            id=worker.worker_id,
            address=worker.address,
            role=worker.pool_role if info is None else info.role,
            model=None if info is None else info.served_model_name,
            state=_state(worker),
            draining=worker.drain.is_draining,
            breaker=known.breaker.state,
            requests=known.num_requests,
            queued_tokens=known.load().queued_tokens,
            incarnation=None if info is None else info.incarnation,
            problem=worker.problem,
            stats=None if info is None else known.stats,
            added_by=worker.added_by,
        )


def _state(worker: Worker) -> WorkerState:
    stats = worker.assignments.stats
    if worker.info is None:
        return "unreachable"
    if not worker.drain.is_draining:
        return "serving"
    is_empty = stats is not None and stats.drain == "drained" and not worker.assignments.num_requests
    return "drained" if is_empty else "draining"


class ChangedWorkerView(WorkerView):
    warning: str
    """Why changes would be lost if the router restarted now. The changes are in effect nevertheless. Empty if
    they would not be lost."""

    @classmethod
    def with_warning(cls, view: WorkerView, warning: str) -> ChangedWorkerView:
        return cls(**dict(view), warning=warning)


class WorkersView(BaseModel):
    workers: list[WorkerView]


class PoolView(BaseModel):
    """All workers of one role and model."""

    role: Role
    model: str | None
    size: int
    serving: int
    draining: int
    """Number of workers that are draining or drained."""
    unreachable: int
    requests: int
    queued_tokens: int
    num_running: int
    num_waiting: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    num_slots: int
    free_slots: int
    leases_held: int
    transfers_in_flight: int


class PoolsView(BaseModel):
    pools: list[PoolView]
    problem: str
    """Why no request of any model can be served; empty if one can."""

    @classmethod
    def of(cls, workers: Iterable[WorkerView], absence: Absence | None) -> PoolsView:
        by_pool: dict[tuple[Role, str | None], list[WorkerView]] = {}
        for worker in workers:
            by_pool.setdefault((worker.role, worker.model), []).append(worker)
        pools = (_pool(role, model, members) for (role, model), members in by_pool.items())
        return cls(
            pools=sorted(pools, key=lambda pool: (pool.role != "prefill", pool.role, pool.model or "")),
            problem="" if absence is None else absence.detail,
        )


def _pool(role: Role, model: str | None, members: list[WorkerView]) -> PoolView:
    stats = [member.stats for member in members if member.stats is not None]
    states = [member.state for member in members]
    return PoolView(
        role=role,
        model=model,
        size=len(members),
        serving=states.count("serving"),
        draining=states.count("draining") + states.count("drained"),
        unreachable=states.count("unreachable"),
        requests=sum(member.requests for member in members),
        queued_tokens=sum(member.queued_tokens for member in members),
        num_running=sum(one.num_running for one in stats),
        num_waiting=sum(one.num_waiting for one in stats),
        num_blocks=sum(one.num_blocks for one in stats),
        free_blocks=sum(one.free_blocks for one in stats),
        cached_blocks=sum(one.cached_blocks for one in stats),
        num_slots=sum(one.num_slots for one in stats),
        free_slots=sum(one.free_slots for one in stats),
        leases_held=sum(one.leases_held for one in stats),
        transfers_in_flight=sum(one.transfers_in_flight for one in stats),
    )


router = APIRouter()


class NewWorker(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    address: str
    """``host:port`` of the server's gRPC port."""
    role: Role
    """What the server does here. A server that does both takes requests like a decode server."""


def worker_views(services: Services) -> list[WorkerView]:
    return [WorkerView.of(worker) for worker in services.pool.workers()]


@router.get("/workers")
async def list_workers(request: Request) -> WorkersView:
    """Lists all servers that this router knows."""
    return WorkersView(workers=worker_views(services_of(request)))


@router.get("/pools")
async def list_pools(request: Request) -> PoolsView:
    """Shows sizes and totals for each role and model. If no request can be served, says why."""
    services = services_of(request)
    return PoolsView.of(worker_views(services), services.absence)


@router.post("/workers", status_code=201, openapi_extra=body_schema(NewWorker))
async def add_worker(request: Request) -> ChangedWorkerView:
    """Adds a server. A server that is not up yet is used as soon as it answers; until then its `problem` says
    why it is not used. A server that is up must have the given role, and serve a model of this router."""
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
    """Removes a server. The server still finishes its requests under way. It is not told that it was removed,
    and keeps running."""
    worker = _find(services_of(request), worker_id)
    await changes_of(request).remove_worker(worker)
    return _changed(request, worker)


@router.post("/workers/{worker_id}/drain")
async def drain(request: Request, worker_id: str) -> ChangedWorkerView:
    """Stops new requests to a server, from all routers. Running answers of a decode server continue on
    another decode server, without a gap or a repeated token. If there is no other decode server, the server
    itself finishes its requests. A prefill server always does.

    Draining lasts until it is undone, even over restarts of the server. If a decode server is drained again,
    it also gives away requests that have arrived meanwhile.
    """
    worker = _find(services_of(request), worker_id)
    await changes_of(request).set_draining(worker, True)
    return _changed(request, worker)


@router.post("/workers/{worker_id}/undrain")
async def undrain(request: Request, worker_id: str) -> ChangedWorkerView:
    """Lets requests be sent to a server again."""
    worker = _find(services_of(request), worker_id)
    await changes_of(request).set_draining(worker, False)
    return _changed(request, worker)


def _changed(request: Request, worker: Worker) -> ChangedWorkerView:
    return ChangedWorkerView.with_warning(WorkerView.of(worker), changes_of(request).warning)


def _find(services: Services, worker_id: str) -> Worker:
    found = next((one for one in services.pool.workers() if one.worker_id == worker_id), None)
    if found is None:
        raise UnknownIdError(
            f"there is no worker {shown(worker_id)}: GET /admin/v1/workers lists all workers"
        )
    return found
