"""``GET /admin/v1/stats``, ``/keys``, ``/models`` and ``/processes``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from router.admin.processes.overview import processes_of
from router.admin.views.key import KeyView
from router.admin.views.missing import MissingProcess
from router.admin.views.model import ModelView
from router.admin.views.process import ProcessesView
from router.admin.views.stats import StatsView


class KeysView(BaseModel):
    keys: list[KeyView]
    """The keys with the most tokens first."""
    missing: list[MissingProcess]


class ModelsView(BaseModel):
    models: list[ModelView]
    missing: list[MissingProcess]


router = APIRouter()


@router.get("/stats")
async def stats(request: Request) -> StatsView:
    """Shows throughput, latencies and transfers of the last minute, as this router saw them."""
    return (await processes_of(request).look()).stats


@router.get("/keys")
async def keys(request: Request) -> KeysView:
    """Shows requests and tokens of each API key since the router processes started."""
    found = await processes_of(request).look()
    return KeysView(keys=found.keys, missing=found.missing)


@router.get("/models")
async def models(request: Request) -> ModelsView:
    """Shows each model's queue and places."""
    found = await processes_of(request).look()
    return ModelsView(models=found.models, missing=found.missing)


@router.get("/processes")
async def processes(request: Request) -> ProcessesView:
    """Lists the router processes that share this port, and those of them that do not answer."""
    return (await processes_of(request).look()).processes
