"""Endpoints of OpenAI and vLLM that this server does not have, each refused by its name.

The status is 404: clients of OpenAI show such an error at once, but send a request again after a 501.
"""

from __future__ import annotations

from typing import NoReturn

from fastapi import APIRouter, Request

from wire.errors import UnsupportedEndpointError

METHODS = ["GET", "POST", "DELETE"]
EMBEDS = "it serves models that write text, and none that embeds or ranks texts"
HEARS_AND_SEES = "it serves models that read and write text only"
REFUSED = {
    "/v1/embeddings": EMBEDS,
    "/pooling": EMBEDS,
    "/classify": EMBEDS,
    "/score": EMBEDS,
    "/v1/score": EMBEDS,
    "/rerank": EMBEDS,
    "/v1/rerank": EMBEDS,
    "/v2/rerank": EMBEDS,
    "/v1/moderations": EMBEDS,
    "/v1/audio/{rest:path}": HEARS_AND_SEES,
    "/v1/images/{rest:path}": HEARS_AND_SEES,
    "/v1/conversations": "continue responses with previous_response_id instead",
    "/v1/responses/compact": "send fewer items instead",
    "/v1/files": "send texts in the request itself",
    "/v1/batches": "send the requests one by one, or have `twinfang batch` answer the file",
}
"""Why, or what to do instead."""

router = APIRouter(include_in_schema=False)


async def refuse(request: Request) -> NoReturn:
    """Raise :class:`UnsupportedEndpointError`."""
    path = request.url.path
    why = REFUSED[request.scope["route"].path]
    raise UnsupportedEndpointError(f"{path} is not supported by this server: {why}")


for _path in REFUSED:
    router.add_api_route(_path, refuse, methods=METHODS, response_model=None)
