"""Refuses bodies that are too large, before they are in memory."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.bodies.body_room import BodyRoom, BodyShare
from router.http.bodies.content_coding import Inflater, inflater_of
from router.http.bodies.turn_lane import ClientOf
from wire.errors import BodyTooLargeError


class BodyLimitMiddleware:
    """Pure ASGI: if a body is too large, reading it raises an error, which becomes a 413.

    A compressed body counts with its inflated size. With a ``Content-Length`` above the limit, a body is
    refused before the first byte is read, otherwise as soon as it has too many bytes.
    :class:`router.http.connection.HttpConnection` drops the rest of a refused body.
    :mod:`router.http.bodies.body_room` limits the memory of all bodies together.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, room: BodyRoom, client_of: ClientOf) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._room = room
        self._client_of = client_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        num_declared = int(declared) if declared.isdigit() else 0
        num_read = 0
        inflater: Inflater | None = None
        is_first = True
        share = BodyShare(self._room, self._client_of(HTTPConnection(scope)))
        share.put_into(scope)

        async def counting_receive() -> Message:
            nonlocal num_read, inflater, is_first
            if num_declared > self._max_bytes:
                raise self._error(f"{num_declared} bytes")
            if is_first:
                is_first, inflater = False, inflater_of(scope["headers"])
            message = await receive()
            if inflater is not None and message["type"] == "http.request":
                message = _inflated(message, inflater, self._max_bytes + 1 - num_read)
            num_new = len(message.get("body", b""))
            num_read += num_new
            if num_read > self._max_bytes:
                raise self._error(f"more than {self._max_bytes} bytes")
            share.take(num_new)
            return message

        try:
            await self._app(scope, counting_receive, send)
        finally:
            share.give_back()

    def _error(self, size: str) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the request's body has {size}, the limit is {self._max_bytes}: "
            "send fewer prompts at a time, or raise the router's --max-body-size, which is in MiB"
        )


def _inflated(message: Message, inflater: Inflater, max_bytes: int) -> Message:
    """Return ``message`` with its part of the body inflated, to at most ``max_bytes``. Any further bytes are
    not even inflated."""
    body = inflater.push(message.get("body", b""), max_bytes)
    if not message.get("more_body", False) and len(body) < max_bytes:
        inflater.end()
    return {**message, "body": body}
