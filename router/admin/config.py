"""``/admin/v1/config``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from router.admin.config_view import ConfigView
from router.services import services_of

router = APIRouter()


@router.get("/config")
async def show_config(request: Request) -> ConfigView:
    """Policies and limits that can be changed while the router runs."""
    return ConfigView.of(services_of(request))
