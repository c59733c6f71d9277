"""Reads a request's JSON body into a pydantic model."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from router.openai_errors import from_validation, shown
from wire.errors import CancelledRequestError, InvalidRequestError

BODY_TIMEOUT_S = 60.0

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, model: type[Model]) -> Model:
    """Raises :class:`InvalidRequestError` for anything but JSON that ``model`` accepts, and
    :class:`CancelledRequestError` if the client goes away while it sends."""
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"Content-Type must be application/json, got {shown(content_type)}; "
            "with curl, add -H 'Content-Type: application/json'"
        )
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.body()
    except TimeoutError as error:
        raise InvalidRequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    except ClientDisconnect as error:
        raise CancelledRequestError("the client went away while sending its request") from error
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from error


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of an endpoint whose body :func:`read_json` reads."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
