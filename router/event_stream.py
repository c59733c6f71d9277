"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.disconnect import run_until_disconnect
from router.openai_errors import error_body
from wire.errors import CancelledRequestError, TwinfangError

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 60.0

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


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
            await run_until_disconnect(receive, self._send_all(send))
        except CancelledRequestError:
            if not self._started:
                raise

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._writes) as writes:
            try:
                async for data in writes:
                    if not self._started:
                        self._started = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                    await _write(send, data, more_body=True)
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
        await _write(send, last, more_body=False)


async def _write(send: Send, data: bytes, *, more_body: bool) -> None:
    """Waits for a slow client, but not for ever: it holds a place on the decode server."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send({"type": "http.response.body", "body": data, "more_body": more_body})
    except TimeoutError as error:
        raise CancelledRequestError(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from error
