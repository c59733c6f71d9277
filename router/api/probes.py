"""For those who operate a router: ``/healthz``, ``/readyz``, ``/metrics``; what other systems ask instead:
``/health``, ``/ping``, ``/version``."""

from __future__ import annotations

import importlib.metadata

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router.http.openai_errors import error_response
from router.observe.sibling_metrics import PATH_OF_ONE, merged, metrics_of_siblings
from router.serving.services import Services, services_of
from wire.errors import UnavailableError

router = APIRouter()

PROBE_PATHS = ("/healthz", "/readyz", "/metrics", "/health", "/ping", "/version")
"""They are answered to the end of a router."""
OPEN_PATHS = frozenset({*PROBE_PATHS, PATH_OF_ONE})
"""Probes and scrapers have no keys."""
VERSION = importlib.metadata.version("twinfang")


@router.get("/healthz")
async def healthz(request: Request) -> JSONResponse:
    """The process is alive, and its event loop keeps up; nothing is said about servers.

    503 if the loop was more than a second late with everything for ten seconds. One that hangs is silent.
    """
    lag = services_of(request).lag
    if lag.is_starved:
        reason = f"this router is too busy: it comes up to {lag.worst_s:.1f} s late to everything"
        return error_response(UnavailableError.told(reason))
    return JSONResponse({"status": "ok", "event_loop_lag_s": round(lag.worst_s, 4)})


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Whether a request, of some model, could be served now; if not, 503 with the reason."""
    return _readiness(services_of(request), "ready")


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """What clients of vLLM ask before they begin: 200 if a request could be served now, as `/readyz`."""
    return _readiness(services_of(request), "ok")


@router.post("/ping", include_in_schema=False)
@router.get("/ping")
async def ping(request: Request) -> JSONResponse:
    """SageMaker's look at a container: 200 if a request could be served now, as `/readyz`."""
    return _readiness(services_of(request), "ok")


@router.get("/version")
async def version() -> dict[str, str]:
    """Of this package."""
    return {"version": VERSION}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Of several processes on one port those of all: see :mod:`router.observe.sibling_metrics`."""
    services = services_of(request)
    services.metrics.server_stats.update(*services.pool.stats())
    own, place = _own_metrics(services), services.config.place
    if place is not None:
        own = merged({place.index: own.decode(), **await metrics_of_siblings(place)})
    return Response(own + services.metrics.of_servers(), media_type=CONTENT_TYPE_LATEST)


@router.get(PATH_OF_ONE, include_in_schema=False)
async def metrics_of_one(request: Request) -> Response:
    """What one of several processes on a port says of itself, for the others."""
    return Response(_own_metrics(services_of(request)), media_type=CONTENT_TYPE_LATEST)


def _readiness(services: Services, status: str) -> JSONResponse:
    """Not raised: a probe is no failed request, and leaves a line in the log only if there is news."""
    if services.drain.has_begun:
        return error_response(UnavailableError.told("this router is about to stop"))
    absence = services.absence
    services.absence_log.saw(absence)
    if services.has_short_absence or absence is None:
        return JSONResponse({"status": status})
    return error_response(absence.error())


def _own_metrics(services: Services) -> bytes:
    for role, num in services.pool.num_connected().items():
        services.metrics.servers.labels(role).set(num)
    for role, num in services.pool.num_configured().items():
        services.metrics.configured.labels(role).set(num)
    gates = {model.name: (model.gate, model.hold) for _, model in services.models}
    services.metrics.gates.update(gates)
    services.metrics.router_view.update(services.pool.assignments())
    return services.metrics.of_router()
