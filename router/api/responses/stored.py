"""What clients can do with stored responses: read them and their input, and delete them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from router.access.client import client_of
from router.api.openai.schemas import answers
from router.api.responses.exchange import parsed_items, store_of
from router.api.responses.schemas import DeletedResponse, ItemList, ResponseObject
from router.http.json_answer import JsonAnswer
from router.http.openai_errors import shown
from wire.errors import InvalidRequestError

MAX_PAGE = 100

router = APIRouter()


def owner_of(request: Request) -> str:
    return client_of(request).api_key.name


@router.get("/v1/responses/{response_id}", responses=answers(ResponseObject))
async def retrieve_response(request: Request, response_id: str, stream: bool = False) -> Response:
    if stream:
        raise InvalidRequestError(
            "stream is not supported here, got True: stored responses are not streamed again; leave it out",
            param="stream",
        )
    stored = await store_of(request).find(owner_of(request), response_id)
    return JsonAnswer({**orjson.loads(stored.response), "output": orjson.Fragment(stored.output)})


@router.delete("/v1/responses/{response_id}", responses=answers(DeletedResponse))
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    await store_of(request).delete(owner_of(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", responses=answers(ResponseObject))
async def cancel_response(request: Request, response_id: str) -> Response:
    await store_of(request).find(owner_of(request), response_id)
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
    store = store_of(request)
    stored = await store.find(owner_of(request), response_id)
    earlier = []
    if stored.previous_id is not None:
        earlier = await parsed_items(request, await store.conversation(owner_of(request), stored.previous_id))
    items = [*earlier, *orjson.loads(stored.input)]
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
