"""The end of a router's process: the router takes no new requests, while requests in progress continue."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.openai_errors import error_response
from wire.errors import UnavailableError


class Drain:
    """Knows whether the router is about to stop, and how many requests it still has to wait for."""

    def __init__(self) -> None:
        self.began_s: float | None = None
        """When the drain began, by the monotonic clock; None: it has not begun."""
        self.num_running = 0

    @property
    def has_begun(self) -> bool:
        return self.began_s is not None

    def begin(self) -> None:
        """Begin the drain. A signal handler may call this."""
        if self.began_s is None:
            self.began_s = time.monotonic()

    def is_over(self, grace_s: float) -> bool:
        """Whether the drain has begun and nothing runs any more, or ``grace_s`` have passed since it
        began."""
        return self.began_s is not None and (
            not self.num_running or time.monotonic() - self.began_s >= grace_s
        )


class DrainMiddleware:
    """Pure ASGI: once the drain has begun, new requests get a 503 and each connection is closed after its
    next answer, so that clients and load balancers go elsewhere. Paths that begin with one of
    ``still_answered`` are answered as before, so that operators can watch the drain; the drain does not wait
    for these answers."""

    def __init__(self, app: ASGIApp, *, drain: Drain, still_answered: tuple[str, ...]) -> None:
        self._app = app
        self._drain = drain
        self._still_answered = still_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self._still_answered):
            await self._app(scope, receive, send)
            return
        if self._drain.has_begun:
            response = error_response(
                UnavailableError.told(
                    "this router is about to stop: send the request again, and another router will take it"
                ),
                scope,
            )
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return

        async def send_and_part(message: Message) -> None:
            if self._drain.has_begun and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        self._drain.num_running += 1
        try:
            await self._app(scope, receive, send_and_part)
        finally:
            self._drain.num_running -= 1
