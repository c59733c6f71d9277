"""Nearly all requests are for two endpoints. This module calls them without FastAPI's work for each call.

These endpoints read their body and make their response themselves. FastAPI would only add overhead: it
matches routes, resolves dependencies, opens exit stacks and has telemetry of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.openai_errors import answer_error
from wire.errors import TwinfangError

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """Pure ASGI: calls the endpoint for a POST to the path of one of ``endpoints``; passes other requests on.

    The application ``app`` has the same endpoints, in order to describe them and to refuse other methods.
    """

    def __init__(self, app: ASGIApp, *, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except TwinfangError as error:  # streams raise too, but only before they have begun
            await answer_error(request, error)(scope, receive, send)
