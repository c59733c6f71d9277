"""``/admin/v1/workers`` and ``/admin/v1/pools``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from router.admin.worker_view import PoolsView, WorkersView, WorkerView
from router.services import Services, services_of

router = APIRouter()


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
