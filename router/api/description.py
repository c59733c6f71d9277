"""``/openapi.json``: the description of the API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
async def describe(request: Request) -> Response:
    """The description in OpenAPI's form. Its bytes are kept: to make them takes milliseconds."""
    state = request.app.state
    if state.description is None:
        state.description = bytes(JSONResponse(request.app.openapi()).body)
    return Response(state.description, media_type="application/json")
