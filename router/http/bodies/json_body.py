"""Reads a request's JSON body into a pydantic model."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Receive

from router.http.bodies.body_room import share_of
from router.http.bodies.bounds import add_bounds, check_bounds
from router.http.bodies.json_shape import check_shape
from router.http.bodies.turn_lane import LARGE_BODY_BYTES
from router.http.client_end import client_end_of
from router.http.openai_errors import from_validation, shown
from router.http.request_head import header_of
from wire.errors import CancelledRequestError, InvalidRequestError

BODY_TIMEOUT_S = 60.0

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, model: type[Model]) -> Model:
    """Read and check a request's body. Raises :class:`InvalidRequestError` unless the body is JSON that
    ``model`` accepts, with all fields within their bounds, and :class:`CancelledRequestError` if the client
    goes away while it sends the body."""
    content_type = header_of(request.scope, b"content-type")
    if content_type is not None and content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"Content-Type must be application/json, got {shown(content_type)}; "
            "with curl, add -H 'Content-Type: application/json'"
        )
    if client_end_of(request.scope).has_whole_body:
        body = await _received(request.receive)  # nothing to wait for
    else:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _received(request.receive)
        except TimeoutError as error:
            raise InvalidRequestError(
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s: send it faster, or send a smaller one"
            ) from error
    client_end_of(request.scope).has_taken_body()
    if len(body) <= LARGE_BODY_BYTES:
        return _parsed(body, model)
    async with share_of(request.scope).turn():
        return _parsed(body, model)


async def _received(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledRequestError("the client went away while sending its request")
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _parsed(body: bytes, model: type[Model]) -> Model:
    check_shape(body)
    try:
        value = from_json(body, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON in UTF-8: {error}") from error
    if isinstance(value, dict):
        check_bounds(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from error


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that :func:`read_json` reads into ``model``."""
    schema = model.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    add_bounds(schema)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return ``schema`` with references replaced by their definitions. Inside an OpenAPI document, references
    would be resolved from the document's root."""
    if isinstance(schema, dict):
        if name := str(schema.get("$ref", "")).removeprefix("#/$defs/"):
            return _inlined(definitions[name], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    return schema
