"""``GET /admin/v1/stats``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from router.admin.stats_view import StatsView
from router.services import services_of

router = APIRouter()


@router.get("/stats")
async def stats(request: Request) -> StatsView:
    """Throughput, latencies and transfers of the last minute, as this router process saw them."""
    return StatsView.of(services_of(request))
