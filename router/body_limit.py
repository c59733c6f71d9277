"""Refuses bodies that are too large before they are in memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wire.errors import BodyTooLargeError


class BodyLimitMiddleware:
    """Pure ASGI: whoever reads a body that is too large gets the error of it, a 413.

    By ``Content-Length`` that is before the first byte is read, else once the bytes are too many. What is
    left of a refused body is read from the socket and dropped by the HTTP server.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        num_declared = int(declared) if declared.isdigit() else 0
        num_read = 0

        async def counting_receive() -> Message:
            nonlocal num_read
            if num_declared > self._max_bytes:
                raise self._error(f"{num_declared} bytes")
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise self._error(f"more than {self._max_bytes} bytes")
            return message

        await self._app(scope, counting_receive, send)

    def _error(self, size: str) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the request's body has {size}, the limit is {self._max_bytes}: "
            "send fewer prompts at a time, or raise the router's --max-body-size, which is in MiB"
        )
