"""``/admin/v1/config``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from router.admin.changed_view import ChangedConfigView
from router.admin.changes import changes_of
from router.admin.config_view import ConfigChange, ConfigView
from router.json_body import body_schema, read_json
from router.services import services_of

router = APIRouter()


@router.get("/config")
async def show_config(request: Request) -> ChangedConfigView:
    """Policies and limits that can be changed while the router runs."""
    return _view(request)


@router.patch("/config", openapi_extra=body_schema(ConfigChange))
async def change_config(request: Request) -> ChangedConfigView:
    """Changes what is named: all of it, or nothing if a value can't work. Requests that run keep what they
    began with. A change that can't be saved (`--state-file`) holds as well, and `warning` says so."""
    body = await read_json(request, ConfigChange)
    await changes_of(request).change_settings(body.values)
    return _view(request)


def _view(request: Request) -> ChangedConfigView:
    view = ConfigView.of(services_of(request))
    return ChangedConfigView.with_warning(view, changes_of(request).warning)
