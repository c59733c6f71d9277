"""``GET /v1/models`` and ``GET /v1/models/{id}``: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from router.completion_request import check_model
from router.services import Services, services_of
from wire.errors import UnavailableError

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_card(services_of(request))]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    services = services_of(request)
    check_model(model, services.config.model_name)
    return _card(services)


def _card(services: Services) -> dict[str, Any]:
    try:
        max_model_len = services.pool.limits().max_model_len
    except UnavailableError:  # the servers have not said yet
        max_model_len = None
    return {
        "id": services.config.model_name,
        "object": "model",
        "created": services.created,
        "owned_by": "twinfang",
        "root": services.config.model_name,
        "parent": None,
        "max_model_len": max_model_len,
    }
