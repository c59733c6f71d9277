"""``/admin/v1/config``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from router.admin.audited_call import note_change
from router.admin.changes import changes_of
from router.admin.processes.overview import processes_of
from router.admin.views.config import ChangedConfigView
from router.http.bodies.json_body import body_schema, read_json
from router.policies.policy_names import PolicyName
from router.serving.services import services_of


class ConfigChange(BaseModel):
    """The settings to change. Missing fields leave their settings unchanged."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prefill_policy: PolicyName | None = None
    decode_policy: PolicyName | None = None
    session_header: Annotated[str, Field(max_length=256)] | None = None
    max_requests_in_flight: int | None = None
    max_queue: int | None = None
    hold_s: Annotated[float, Field(allow_inf_nan=False)] | None = None
    max_choices: int | None = None
    request_timeout_s: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The given values by name."""
        return self.model_dump(exclude_none=True)


router = APIRouter()


@router.get("/config")
async def show_config(request: Request) -> ChangedConfigView:
    """Shows the policies and limits that can be changed while the router runs."""
    return (await processes_of(request).look()).config


@router.patch("/config", openapi_extra=body_schema(ConfigChange))
async def change_config(request: Request) -> ChangedConfigView:
    """Changes the named settings: all of them, or none if a value can't work. Requests under way keep the
    settings they began with. A change that can't be saved (`--state-file`) takes effect as well, and
    `warning` says so."""
    body = await read_json(request, ConfigChange)
    before = {name: getattr(services_of(request).config, name) for name in body.values}
    missing = await changes_of(request).change_settings(body.values)
    note_change(request, before=before, after=body.values)
    view = processes_of(request).own_config
    return ChangedConfigView.with_warning(view, changes_of(request).warning_of(missing), missing)
