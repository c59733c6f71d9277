"""Puts the routes of the admin API together."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel

from router.access.credentials import Credentials
from router.admin import config, events, purge, requests, stats, workers
from router.admin.admin_token import AdminToken, SecretCheck
from router.admin.role_check import PREFIX, RoleCheck
from router.audit.audit_log import Audit


class ErrorDetail(BaseModel):
    message: str
    """The error's text. It names the value, the limit and the remedy."""
    type: str
    param: str | None
    code: str


class ErrorView(BaseModel):
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorView, "description": "A value can't work; nothing was changed."},
    401: {"model": ErrorView, "description": "The admin token, the key or the token is missing or wrong."},
    403: {"model": ErrorView, "description": "The caller's role does not suffice."},
    404: {"model": ErrorView, "description": "There is no worker or request with this id."},
    409: {"model": ErrorView, "description": "What should be added is there already."},
    503: {"model": ErrorView, "description": "A worker that should be told of the change does not answer."},
    "default": {"model": ErrorView, "description": "Any other error has the same form."},
}


MODULES = (workers, requests, config, stats, events, purge)
"""Those with the routes of the admin API."""


def add_admin_api(app: FastAPI, credentials: Credentials, audit: Audit) -> None:
    """Add the routes of the admin API, and the check for the caller's role that runs before them."""
    documented = HTTPBearer(
        auto_error=False,
        description="The token in --admin-token-file, or an API key or a token of the issuer with a role",
    )
    api = APIRouter(prefix=PREFIX, tags=["admin"], dependencies=[Security(documented)], responses=ERRORS)
    for module in MODULES:
        api.include_router(module.router)
    app.include_router(api)
    app.add_middleware(RoleCheck, credentials=credentials, audit=audit)


def add_process_api(app: FastAPI, secret: str, audit: Audit) -> None:
    """Add the routes by which the processes on this port ask one another."""
    from router.admin import process_routes
    from router.admin.processes.channel import PREFIX as PROCESS_PREFIX

    app.include_router(process_routes.router)
    where = "a secret of this router's processes"
    token = AdminToken.of(secret)
    app.add_middleware(SecretCheck, token=token, prefix=PROCESS_PREFIX, where=where, audit=audit)
