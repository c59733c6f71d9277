"""``GET /v1/models`` and ``GET /v1/models/{id}``: the models that are served, and their aliases."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from router.api.openai.schemas import ModelCard, ModelCards, answers
from router.models.catalog import ServedModel
from router.serving.services import services_of

router = APIRouter()


@router.get("/v1/models", responses=answers(ModelCards))
async def list_models(request: Request) -> dict[str, Any]:
    services = services_of(request)
    cards = [_card(name, model, services.created) for name, model in services.models]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{model:path}", responses=answers(ModelCard))
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    services = services_of(request)
    return _card(model, services.models.find(model), services.created)


def _card(name: str, model: ServedModel, created: int) -> dict[str, Any]:
    """Return what is known of a model or alias. ``root`` is the model's own name; for an alias it differs
    from ``id``."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "twinfang",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
