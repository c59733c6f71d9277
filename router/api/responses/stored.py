"""What clients can do with stored responses: read them and their input, and delete them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from router.api.openai.schemas import answers
from router.api.responses.exchange import parsed_items, responses_of
from router.api.responses.schemas import DeletedResponse, ItemList, ResponseObject
from router.http.bodies.body_room import share_of
from router.http.json_answer import JsonAnswer
from router.http.openai_errors import shown
from wire.errors import InvalidRequestError

MAX_PAGE = 100

router = APIRouter()


@router.get("/v1/responses/{response_id}", responses=answers(ResponseObject))
async def retrieve_response(request: Request, response_id: str, stream: bool = False) -> Response:
    if stream:
        raise InvalidRequestError(
            "stream is not supported here, got True: stored responses are not streamed again; leave it out",
            param="stream",
        )
    stored = await responses_of(request).find(response_id)
    # Counts as a part of the body until it is sent. Otherwise slow readers could fill the memory.
    share_of(request.scope).take(len(stored.response) + len(stored.output))
    return JsonAnswer({**orjson.loads(stored.response), "output": orjson.Fragment(stored.output)})


@router.delete("/v1/responses/{response_id}", responses=answers(DeletedResponse))
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    await responses_of(request).delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", responses=answers(ResponseObject))
async def cancel_response(request: Request, response_id: str) -> Response:
    await responses_of(request).find(response_id)
    raise InvalidRequestError(
        f"response {shown(response_id)} has ended: only responses with background: true can be cancelled, "
        "which are not supported here. To end a request, close its connection"
    )


@router.get("/v1/responses/{response_id}/input_items", responses=answers(ItemList))
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Return a page of the items that a response answers, with those of the responses that it continues."""
    stored = await responses_of(request).find(response_id)
    responses = [replace(stored, output=b"[]")]
    if stored.previous_id is not None:
        responses = [*await responses_of(request).conversation(stored.previous_id), *responses]
    items = await parsed_items(request, responses)
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidRequestError(f"after: no item {shown(after)} in this response", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    ends = (
        {"first_id": page[0]["id"], "last_id": page[-1]["id"]}
        if page
        else {"first_id": None, "last_id": None}
    )
    return JsonAnswer({"object": "list", "data": page, **ends, "has_more": len(items) > limit})
