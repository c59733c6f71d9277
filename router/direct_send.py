"""The HTTP server's own ``send``, for the parts of a streamed answer."""

from __future__ import annotations

from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send

KEY = "twinfang.direct_send"


class DirectSendMiddleware:
    """Pure ASGI, the outermost one: keeps the ``send`` that it is given where a stream finds it.

    What other middlewares and the framework wrap around it concerns the start of an answer. Each wrapper is a
    coroutine more for every event, and a router sends one for every token.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[KEY] = send
        await self._app(scope, receive, send)


def direct_send(scope: Scope, otherwise: Send) -> Send:
    """For body parts, once the start has gone the usual way."""
    return cast(Send, scope.get(KEY, otherwise))
