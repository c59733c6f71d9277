"""An answer that is one JSON object, however long it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.heap import fitted
from router.http.disconnect import WhileConnected
from wire.errors import CancelledRequestError

PART_BYTES = 256 << 10
"""The number of bytes that are passed to the connection at a time. After each part, the answer waits until
the client has read enough."""


class JsonAnswer(Response):
    """Sends a long body in parts, so that the connection does not keep a second copy of all of it.

    If the client reads nothing for too long (:class:`WhileConnected`), the answer is given up.
    """

    media_type = "application/json"

    def __init__(self, content: Mapping[str, object]) -> None:
        super().__init__(fitted(orjson.dumps(content)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = memoryview(self.body)
        if len(body) <= PART_BYTES:
            await super().__call__(scope, receive, send)
            return
        # The status is sent: an error can't be answered any more.
        with suppress(CancelledRequestError), WhileConnected(scope) as connected:
            await self._send_parts(body, send, connected)

    async def _send_parts(self, body: memoryview, send: Send, connected: WhileConnected) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for start in range(0, len(body), PART_BYTES):
            connected.write_began()
            part, has_more = bytes(body[start : start + PART_BYTES]), start + PART_BYTES < len(body)
            await send({"type": "http.response.body", "body": part, "more_body": has_more})
            connected.write_ended()
