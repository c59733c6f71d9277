"""Refuses bodies that are too large, before they are in memory."""

from __future__ import annotations

from starlette.types import Message, Receive, Scope

from router.http.bodies.body_room import BodyShare
from router.http.bodies.content_coding import Inflater, inflater_of
from wire.errors import BodyTooLargeError


class BoundedBody:
    """Receives one request's body, and raises :class:`BodyTooLargeError` (413) if it is too large.

    A compressed body counts with its inflated size. With a ``Content-Length`` above the limit, a body is
    refused before the first byte is read, otherwise as soon as it has too many bytes.
    :class:`router.http.connection.HttpConnection` drops the rest of a refused body.
    :mod:`router.http.bodies.body_room` limits the memory of all bodies together.
    """

    __slots__ = ("_headers", "_inflater", "_is_first", "_max_bytes", "_num_read", "_receive", "_share")

    def __init__(self, scope: Scope, receive: Receive, share: BodyShare, max_bytes: int) -> None:
        self._headers = scope["headers"]
        self._receive = receive
        self._share = share
        self._max_bytes = max_bytes
        self._num_read = 0
        self._inflater: Inflater | None = None
        self._is_first = True

    async def receive(self) -> Message:
        """Return the next ASGI message, as the server's ``receive`` does."""
        if self._is_first:
            self._begin()
        message = await self._receive()
        if self._inflater is not None and message["type"] == "http.request":
            message = _inflated(message, self._inflater, self._max_bytes + 1 - self._num_read)
        num_new = len(message.get("body", b""))
        self._num_read += num_new
        if self._num_read > self._max_bytes:
            raise self._error(f"more than {self._max_bytes} bytes")
        self._share.take(num_new)
        return message

    def _begin(self) -> None:
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                raise self._error(f"{int(value)} bytes")
        self._inflater = inflater_of(self._headers)
        self._is_first = False

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
