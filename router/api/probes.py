"""Probes for operators: ``/healthz``, ``/readyz``, ``/metrics``; and those that other systems use instead:
``/health``, ``/ping``, ``/version``."""

from __future__ import annotations

import importlib.metadata

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router.access.audited import operator_with
from router.access.client import client_of
from router.access.credentials import has_secret
from router.api.metrics_pages import MetricsPages
from router.fleet.absence import Absence
from router.http.openai_errors import error_response
from router.observe.sibling_metrics import PATH_OF_ONE
from router.serving.services import Services, services_of
from wire.errors import UnavailableError

router = APIRouter()

PROBE_PATHS = ("/healthz", "/readyz", "/metrics", "/health", "/ping", "/version")
"""The router answers these paths until its process ends."""
PATHS_WITHOUT_TURN = frozenset(PROBE_PATHS) - {"/metrics"}
"""Answers that cost next to nothing, and that must not wait for others."""
OPEN_PATHS = frozenset({*PROBE_PATHS, PATH_OF_ONE})
"""Paths that need no API key: probes and scrapers have none."""
VERSION = importlib.metadata.version("twinfang")
OTHER_RELEASE = Absence(
    "most decode servers are of another release",
    "most decode servers speak another protocol version: routers of their release serve until half of the "
    "servers are of this one",
)


@router.get("/healthz")
async def healthz(request: Request) -> JSONResponse:
    """Whether the process is alive and its event loop keeps up. Servers don't matter here.

    503 if for ten seconds the loop has been more than a second late with everything. A loop that hangs does
    not answer at all.
    """
    lag = services_of(request).lag
    if lag.is_starved:
        reason = f"this router is too busy: its event loop runs up to {lag.worst_s:.1f} s late"
        return error_response(UnavailableError.told(reason), request.scope)
    return JSONResponse({"status": "ok", "event_loop_lag_s": round(lag.worst_s, 4)})


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Whether a request for some model would be served now, or soon by servers that are expected back. If
    not, 503 with the reason."""
    return _readiness(request, "ready")


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """The probe that vLLM's clients use before they begin. It says what `/readyz` says: 200 if a request
    would be served."""
    return _readiness(request, "ok")


@router.post("/ping", include_in_schema=False)
@router.get("/ping")
async def ping(request: Request) -> JSONResponse:
    """SageMaker's probe of a container. It says what `/readyz` says: 200 if a request would be served."""
    return _readiness(request, "ok")


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this package."""
    return {"version": VERSION}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' format. If several processes share one port, the metrics of all of them: see
    :mod:`router.observe.sibling_metrics`. Figures of single API keys, with the keys' names, are shown only to
    who has the role `view`. With `--metrics-need-role`, nobody else sees anything."""
    with_keys = await _may_see_keys(request, services_of(request))
    page = await _pages_of(request).of_all(client_of(request).name, with_keys=with_keys)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


@router.get(PATH_OF_ONE, include_in_schema=False)
async def metrics_of_one(request: Request) -> Response:
    """The metrics of this process alone. The other processes on its port read them."""
    services, place = services_of(request), services_of(request).config.place
    is_sibling = place is not None and bool(place.secret) and has_secret(request.scope, place.secret)
    if services.config.metrics_need_role and not is_sibling:
        await operator_with("view", services.credentials, services.audit, request.scope)
    page = await _pages_of(request).of_one(client_of(request).name, with_keys=is_sibling)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


def _pages_of(request: Request) -> MetricsPages:
    pages: MetricsPages = request.app.state.metrics_pages
    return pages


async def _may_see_keys(request: Request, services: Services) -> bool:
    """Return whether a scrape shows the figures of keys. If metrics need a role, raises what
    :meth:`Credentials.operator_with` raises."""
    if services.config.metrics_need_role:
        await operator_with("view", services.credentials, services.audit, request.scope)
        return True
    return await services.credentials.has_role("view", request.scope)


def _readiness(request: Request, status: str) -> JSONResponse:
    """Answer whether this router is ready. Errors are returned, not raised: a probe is not a failed request,
    and the log only gets a line if something has changed."""
    services = services_of(request)
    if services.drain.has_begun:
        return error_response(UnavailableError.told("this router is about to stop"), request.scope)
    absence = services.absence
    if absence is None and services.leaves_requests_to_another_release:
        absence = OTHER_RELEASE
    services.absence_log.saw(absence)
    is_short = services.has_short_absence  # asked at every probe: holds note when servers were last there
    if absence is None or (absence is not OTHER_RELEASE and is_short):
        return JSONResponse({"status": status})
    return error_response(absence.error(), request.scope)
