"""Server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, cast

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.direct_send import direct_send
from router.disconnect import run_until_disconnect
from router.openai_errors import error_body
from router.write_limit import WriteLimit
from wire.errors import CancelledRequestError, TwinfangError

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

WriteNow = Callable[[bytes], bool]


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream(Response):
    """Sends what ``writes`` yields, each item in one write; the last one brings :data:`DONE`.

    The status goes out with the first item, so an error before it is an ordinary HTTP error; one
    after it becomes an error event. The generator is closed as soon as the client goes away. It is given
    :meth:`write_now`.
    """

    media_type = "text/event-stream"

    def __init__(self, writes: Callable[[WriteNow], AsyncGenerator[bytes, None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._writes = writes
        self._send: Send | None = None
        """Set once the status is out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(send, direct_send(scope, send)))
        except CancelledRequestError:
            if self._send is None:
                raise

    def write_now(self, data: bytes) -> bool:
        """Writes without waiting; False if that can't be, and then nothing was written.

        Only while the generator waits for news, or two writes would go on at one time. A write that does not
        wait needs no task, and waking one for each token costs more than the write.
        """
        if self._send is None:
            return False
        writing = cast(Coroutine[Any, Any, None], self._send(_body(data)))
        try:
            writing.send(None)
        except StopIteration:
            return True
        writing.close()  # uvicorn waits for a slow client before it takes anything
        return False

    async def _send_all(self, send_start: Send, send: Send) -> None:
        async with aclosing(self._writes(self.write_now)) as writes, WriteLimit() as limit:
            try:
                async for data in writes:
                    limit.began()
                    if self._send is None:
                        await send_start(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                        self._send = send
                    await send(_body(data))
                    limit.ended()
                return
            except TwinfangError as error:
                if self._send is None or isinstance(error, CancelledRequestError):
                    raise
                last = event(error_body(error)) + DONE
            except Exception:
                if self._send is None:
                    raise
                log.exception("a stream failed")
                last = event(error_body(TwinfangError("the router failed on this request"))) + DONE
            limit.began()
            await send(_body(last))


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": not data.endswith(DONE)}
