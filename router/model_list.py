"""``GET /v1/models`` and ``GET /v1/models/{id}``: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from router.services import Services, services_of
from router.text_request import check_model

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
    return {
        "id": services.config.model_name,
        "object": "model",
        "created": services.created,
        "owned_by": "twinfang",
        "root": services.config.model_name,
        "parent": None,
        "max_model_len": services.max_model_len,
    }
