"""``/admin/v1/config``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from router.admin.changes import changes_of
from router.admin.config_view import ConfigChange, ConfigView
from router.json_body import body_schema, read_json
from router.services import services_of

router = APIRouter()


@router.get("/config")
async def show_config(request: Request) -> ConfigView:
    """Policies and limits that can be changed while the router runs."""
    return ConfigView.of(services_of(request))


@router.patch("/config", openapi_extra=body_schema(ConfigChange))
async def change_config(request: Request) -> ConfigView:
    """Changes what is named: all of it, or nothing if a value can't work. Requests that run keep what they
    began with."""
    body = await read_json(request, ConfigChange)
    await changes_of(request).change_settings(body.values)
    return ConfigView.of(services_of(request))
