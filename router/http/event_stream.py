"""Server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.client_end import client_end_of
from router.http.disconnect import WhileConnected
from router.http.openai_errors import tell_log
from wire.errors import CancelledRequestError, TwinfangError

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


WriteNow = Callable[[bytes], bool]
"""Writes a part of an answer without waiting. Returns False, and writes nothing, if the answer has not begun,
the client reads too slowly or the answer is not sent in chunks."""


class LastWrite(bytes):
    """The write that ends a stream."""


class EventStream(Response):
    """Sends the items that ``writes`` yields, each in one write. Only the last item is a :class:`LastWrite`.

    The status goes out with the first item. So an error before the first item is answered with an HTTP error
    status, while a later error becomes the stream's end, as ``error_end`` writes it.

    ``writes`` gets a :data:`WriteNow` as its argument. It is to be called only while the generator waits for
    deltas: otherwise two writes could overlap. A write that does not wait needs no task, and waking a task
    for each token costs more than the write. The generator that ``writes`` returns is closed as soon as the
    client goes away.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        writes: Callable[[WriteNow], AsyncGenerator[bytes, None]],
        error_end: Callable[[TwinfangError], bytes],
    ) -> None:
        self.status_code, self.background = 200, None
        self.raw_headers = list(HEADERS)
        self._writes = writes
        self._error_end = error_end
        self._has_begun = False
        self._scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        try:
            with WhileConnected(scope) as connected:
                await self._send_all(send, connected)
        except CancelledRequestError:
            if not self._has_begun:
                raise

    async def _send_all(self, send: Send, connected: WhileConnected) -> None:
        async with aclosing(self._writes(client_end_of(self._scope).write_part)) as writes:
            try:
                async for data in writes:
                    connected.write_began()
                    if not self._has_begun:
                        self._has_begun = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                        connected.write_began()
                    await send(_body(data))
                    connected.write_ended()
                return
            except TwinfangError as error:
                if not self._has_begun or isinstance(error, CancelledRequestError):
                    raise
                tell_log(self._scope, error)
                last = self._error_end(error)
            except Exception:
                if not self._has_begun:
                    raise
                log.exception("request %s: its stream failed", self._scope.get("state", {}).get("request_id"))
                failure = TwinfangError.told("the router failed on this request; its log says why")
                last = self._error_end(failure)
            connected.write_began()
            await send(_body(LastWrite(last)))


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": not isinstance(data, LastWrite)}
