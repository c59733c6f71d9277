"""Server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

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


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream(Response):
    """Sends what ``writes`` yields, each item in one write, and ``[DONE]`` behind it.

    The status goes out with the first item, so an error before it is an ordinary HTTP error; one
    after it becomes an error event. The generator is closed as soon as the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, writes: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._writes = writes
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(send, direct_send(scope, send)))
        except CancelledRequestError:
            if not self._started:
                raise

    async def _send_all(self, send_start: Send, send: Send) -> None:
        async with aclosing(self._writes) as writes, WriteLimit() as limit:
            try:
                async for data in writes:
                    limit.began()
                    if not self._started:
                        self._started = True
                        await send_start(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    limit.ended()
                last = DONE
            except TwinfangError as error:
                if not self._started or isinstance(error, CancelledRequestError):
                    raise
                last = event(error_body(error)) + DONE
            except Exception:
                if not self._started:
                    raise
                log.exception("a stream failed")
                last = event(error_body(TwinfangError("the router failed on this request"))) + DONE
            limit.began()
            await send({"type": "http.response.body", "body": last, "more_body": False})
