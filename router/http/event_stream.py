"""Server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.connection import WRITE_PART, WritePart
from router.http.disconnect import WriteLimit, run_until_disconnect
from router.http.openai_errors import tell_log
from wire.errors import CancelledRequestError, TwinfangError

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class LastWrite(bytes):
    """The write that ends a stream."""


class EventStream(Response):
    """Sends the items that ``writes`` yields, each in one write. Only the last item is a :class:`LastWrite`.

    The status goes out with the first item. So an error before the first item is answered with an HTTP error
    status, while a later error becomes the stream's end, as ``error_end`` writes it. ``writes`` gets
    :meth:`write_now` as its argument. The generator that it returns is closed as soon as the client goes
    away.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        writes: Callable[[WritePart], AsyncGenerator[bytes, None]],
        error_end: Callable[[TwinfangError], bytes],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._writes = writes
        self._error_end = error_end
        self._write_part: WritePart | None = None
        self._has_begun = False
        self._scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write_part = scope.get(WRITE_PART)
        self._scope = scope
        try:
            await run_until_disconnect(receive, self._send_all(send))
        except CancelledRequestError:
            if not self._has_begun:
                raise

    def write_now(self, data: bytes) -> bool:
        """Write without waiting. Return False if that is not possible; then nothing was written.

        To be called only while the generator waits for deltas: otherwise two writes could overlap. A write
        that does not wait needs no task, and waking a task for each token costs more than the write.
        """
        return self._has_begun and self._write_part is not None and self._write_part(data)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._writes(self.write_now)) as writes, WriteLimit() as limit:
            try:
                async for data in writes:
                    limit.began()
                    if not self._has_begun:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                        self._has_begun = True
                    await send(_body(data))
                    limit.ended()
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
            limit.began()
            await send(_body(LastWrite(last)))


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": not isinstance(data, LastWrite)}
