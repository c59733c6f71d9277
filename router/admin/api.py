"""The routes of the admin API, put together."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Security
from fastapi.security import HTTPBearer

from router.admin import config, events, requests, stats, workers
from router.admin.admin_token import PREFIX, AdminToken, AdminTokenMiddleware


def add_admin_api(app: FastAPI, token: AdminToken) -> None:
    """Adds the routes, and before them what asks for the token."""
    documented = HTTPBearer(auto_error=False, description="The token in --admin-token-file")
    api = APIRouter(prefix=PREFIX, tags=["admin"], dependencies=[Security(documented)])
    for module in (workers, requests, config, stats, events):
        api.include_router(module.router)
    app.include_router(api)
    app.add_middleware(AdminTokenMiddleware, token=token)
