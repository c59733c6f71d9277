"""For those who operate a router: ``/healthz``, ``/readyz``, ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router.openai_errors import error_response
from router.services import services_of
from wire.errors import UnavailableError

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process is alive; nothing is said about servers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Whether a request, of some model, could be served now; if not, 503 with the reason."""
    reason = services_of(request).pool.not_ready_reason()
    if reason is not None:  # not raised: a probe is no failed request and leaves no line in the log
        return error_response(UnavailableError(reason))
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    services = services_of(request)
    for role, num in services.pool.num_connected().items():
        services.metrics.servers.labels(role).set(num)
    services.metrics.server_figures.update(services.pool.assignments())
    services.metrics.told_figures.update(*services.pool.stats())
    return Response(services.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
