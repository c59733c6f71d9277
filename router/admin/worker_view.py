"""Workers and pools as the admin API shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel

from router.absence import Absence
from router.circuit_breaker import BreakerState
from router.worker_id import AddedBy
from router.worker_watch import Worker
from wire.generation import ServerStats
from wire.handoff import Role

WorkerState = Literal["serving", "draining", "drained", "unreachable"]


class WorkerView(BaseModel):
    """One server as this router knows it. Figures are at most two seconds old, less while it has work."""

    id: str
    address: str
    role: Role
    model: str | None
    """What the server says that it serves; null until it has been reached."""
    state: WorkerState
    draining: bool
    """Whether it was asked to take no new requests, reachable or not."""
    breaker: BreakerState
    requests: int
    """Of this router, under way there."""
    queued_tokens: int
    """Tokens of prompts that a new request would wait for."""
    incarnation: str | None
    problem: str
    """Why it is not in use; empty if it is."""
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


class WorkersView(BaseModel):
    workers: list[WorkerView]


class PoolView(BaseModel):
    """All workers of one role and model."""

    role: Role
    model: str | None
    size: int
    serving: int
    draining: int
    """Those that have drained too."""
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
    figures = [member.stats for member in members if member.stats is not None]
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
        num_running=sum(one.num_running for one in figures),
        num_waiting=sum(one.num_waiting for one in figures),
        num_blocks=sum(one.num_blocks for one in figures),
        free_blocks=sum(one.free_blocks for one in figures),
        cached_blocks=sum(one.cached_blocks for one in figures),
        num_slots=sum(one.num_slots for one in figures),
        free_slots=sum(one.free_slots for one in figures),
        leases_held=sum(one.leases_held for one in figures),
        transfers_in_flight=sum(one.transfers_in_flight for one in figures),
    )
