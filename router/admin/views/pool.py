"""Pools as the admin API shows them: sums over the servers of one role and model."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from router.admin.views.missing import MissingProcess
from router.admin.views.worker import WorkerView
from wire.messages.handoff import Role


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
    missing: list[MissingProcess]

    @classmethod
    def of(cls, workers: Iterable[WorkerView], problem: str, missing: list[MissingProcess]) -> PoolsView:
        by_pool: dict[tuple[Role, str | None], list[WorkerView]] = {}
        for worker in workers:
            by_pool.setdefault((worker.role, worker.model), []).append(worker)
        pools = (_pool(role, model, members) for (role, model), members in by_pool.items())
        return cls(
            pools=sorted(pools, key=lambda pool: (pool.role != "prefill", pool.role, pool.model or "")),
            problem=problem,
            missing=missing,
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
