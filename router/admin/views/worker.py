"""Servers as the admin API shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from router.admin.views.missing import MissingProcess
from router.fleet.links.circuit_breaker import BreakerState
from router.fleet.links.server_link import AddedBy
from router.fleet.links.worker_watch import Worker
from router.observe.last_minute import LastMinute
from router.serving.services import Services
from wire.messages.generation import ServerStats
from wire.messages.handoff import Role

WorkerState = Literal["serving", "draining", "drained", "unreachable"]


class WorkerView(BaseModel):
    """One server as this router knows it. The router asks for the server's stats every two seconds, and more
    often while the server has requests of this router. With several router processes, figures of their own
    work are summed."""

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
    cached_prefixes: int | None
    """Starts in the server's prefix cache that this router knows. Null if no policy asks for them."""
    recent_prompt_tokens: int
    """Prompt tokens of the choices that this server prefilled and that finished in the last minute."""
    recent_cached_tokens: int
    """The part of them that a prefix cache held."""

    @classmethod
    def of(cls, worker: Worker, recent: LastMinute) -> WorkerView:
        info, known = worker.info, worker.assignments
        prompt_tokens, cached_tokens = recent.of_worker(worker.worker_id)
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
            cached_prefixes=None if known.prefixes.version is None else len(known.prefixes),
            recent_prompt_tokens=prompt_tokens,
            recent_cached_tokens=cached_tokens,
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
    """Why the change would be lost if the router restarted now, or which router processes do not know it yet.
    It is in effect nevertheless. Empty if there is no such reason."""
    missing: list[MissingProcess]
    """Router processes that did not answer. Each of them gets the change when it answers again."""

    @classmethod
    def with_warning(cls, view: WorkerView, warning: str, missing: list[MissingProcess]) -> ChangedWorkerView:
        return cls(**dict(view), warning=warning, missing=missing)


class WorkersView(BaseModel):
    workers: list[WorkerView]
    missing: list[MissingProcess]


def worker_views(services: Services) -> list[WorkerView]:
    return [WorkerView.of(worker, services.recent) for worker in services.pool.workers()]


# --- several processes' views of the same server ---------------------------------------------------

BREAKERS: tuple[BreakerState, ...] = ("closed", "half_open", "open")
"""From good to bad."""


def merged_workers(views: Sequence[Sequence[WorkerView]]) -> list[WorkerView]:
    """Merge the views of several processes, the first of which is the one that was asked."""
    by_id: dict[str, list[WorkerView]] = {}
    for of_process in views:
        for view in of_process:
            by_id.setdefault(view.id, []).append(view)
    return [merged_worker(same) for same in by_id.values()]


def merged_worker(views: Sequence[WorkerView]) -> WorkerView:
    """Merge the views that several processes have of one server."""
    if len(views) == 1:
        return views[0]
    reaching = [view for view in views if view.state != "unreachable"]
    best = max(reaching or views, key=_newness)
    known = [view.cached_prefixes for view in views if view.cached_prefixes is not None]
    return WorkerView(
        id=best.id,
        address=best.address,
        role=best.role,
        model=best.model,
        state=_state_of({view.state for view in reaching}),
        draining=any(view.draining for view in reaching or views),
        breaker=max((view.breaker for view in views), key=BREAKERS.index),
        requests=sum(view.requests for view in views),
        queued_tokens=max(view.queued_tokens for view in views),  # each process counts the others' work, too
        incarnation=best.incarnation,
        problem=next((view.problem for view in views if view.problem), ""),
        stats=best.stats,
        added_by=views[0].added_by,
        cached_prefixes=max(known, default=None),
        recent_prompt_tokens=sum(view.recent_prompt_tokens for view in views),
        recent_cached_tokens=sum(view.recent_cached_tokens for view in views),
    )


def _newness(view: WorkerView) -> tuple[int, int]:
    """Return a key that is higher for newer stats of one incarnation: counters only grow."""
    stats = view.stats
    return (-1, 0) if stats is None else (stats.num_steps, stats.prefill_tokens + stats.decode_tokens)


def _state_of(states: set[WorkerState]) -> WorkerState:
    """Return the state of a server whose states several processes have reported. A server is drained only if
    all of them say so."""
    if not states:
        return "unreachable"
    return states.pop() if len(states) == 1 else "draining"
