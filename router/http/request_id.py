"""Gives each HTTP request an id and returns it in ``X-Request-Id``."""

from __future__ import annotations

import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
ACCEPTED = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
"""Ids appear in logs, headers and messages. A client's id is only used if it can do no harm there."""


class RequestIdMiddleware:
    """Pure ASGI: stores the client's ``X-Request-Id``, or a new id, in ``scope["state"]["request_id"]``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        request_id = given if ACCEPTED.fullmatch(given) else secrets.token_hex(16).encode()
        state = scope.setdefault("state", {})
        state["request_id"], state["arrived_s"] = request_id.decode(), time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
