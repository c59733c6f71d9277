"""A client's connection: uvicorn's class for connections, with limits for the headers and trailers of
requests.

uvicorn limits headers only with its h11 parser. The httptools parser needs a fifth of the time, but limits
nothing: a client that never ends its headers would fill the memory, and a client that never sends a header
would keep its connection. Trailers, which follow a body's chunks, would be added to the headers without a
limit.

In this module, a request's head is its URL and headers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from typing import Any, cast

from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.http.client_end import ClientEnd
from router.http.connections.open_connections import OpenConnections
from router.http.half_close import COMMENT, CONTINUE, HalfClose
from router.http.lingering import LingeringTransport
from wire.http.address import host_port
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

UVICORN = logging.getLogger("uvicorn.of_connections")
UVICORN.setLevel(logging.ERROR)

HEADER_TIMEOUT_S = 30.0
"""The maximum time until a request's head is complete. For a connection's first request, it counts from the
start of the connection; for later requests, from the first byte of the head."""


class HttpConnection(HttpToolsProtocol):
    """Answers a request with 431 if its head or its trailers have more bytes than uvicorn's setting
    ``h11_max_incomplete_event_size``."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self._may_send)
        super().connection_made(cast(asyncio.Transport, self._lingering))
        self._half_close: HalfClose | None = None
        self._keeps_alive = True
        self._previous_cycle: RequestResponseCycle | None = None
        self._client_ends: deque[ClientEnd] = deque()
        """Those of the requests that are not answered yet, oldest first."""
        self._refusal: bytes | None = None
        """The answer to input that is refused. It is the connection's last answer, and is sent after the
        answers to the complete requests that came before."""
        self._is_refused = False
        self.logger = UVICORN  # uvicorn's warnings name no client and advise installing packages
        self._is_in_head = True
        self._num_line_bytes = 0  # bytes since the last end of a request, or of a part of its body
        self._num_trailer_bytes = 0
        self._is_too_large = False
        self._head_timeout: asyncio.TimerHandle | None = None
        self._await_head()
        connections: OpenConnections = cast(FastAPI, self.config.app).state.connections
        self._place = connections.opened(self.client[0] if self.client else "", transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._place.left()
        self._lingering.lost()
        if self._half_close is not None:
            self._half_close.stop()
            self._half_close = None  # breaks a cycle: it refers to this connection
        super().connection_lost(exc)
        while self._client_ends:
            self._client_ends.popleft().lost()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True, which keeps the connection open, if a complete request still waits for its answer."""
        cycle = self.cycle
        if self._lingering.lingers or cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if not self.transport.can_write_eof():  # TLS: asyncio closes both directions
            return False
        cycle.keep_alive = self._refusal is not None
        self._half_close = HalfClose(self.transport, self._probe, has_begun=cycle.response_started)
        return True

    def data_received(self, data: bytes) -> None:
        if self._lingering.lingers or self._refusal is not None:
            self._lingering.drop(len(data))
            return
        self._num_line_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._num_line_bytes > self._max_bytes:
            self._is_too_large = True
            self.send_400_response("")
        elif self._is_in_head and self._num_line_bytes and self._head_timeout is None:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count and drop trailers, the headers after a body: nothing in the router uses them."""
        if self._is_in_head:
            super().on_header(name, value)
            return
        self._num_trailer_bytes += len(name) + len(value) + 4
        self._refuse_above(self._num_trailer_bytes, "the trailers are")

    def on_body(self, body: bytes) -> None:
        self._num_line_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._is_in_head = False
        self._num_line_bytes = self._num_trailer_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._refuse_above(size, "the head is")
        self._previous_cycle = self.cycle
        super().on_headers_complete()
        if self.cycle is not None:
            self._place.works()
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            client_end = ClientEnd(self.cycle)
            client_end.put_into(scope)
            self._client_ends.append(client_end)
            # An answer that begins before the body's end is the connection's last: the body may never end.
            self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
            if scope["http_version"] < "1.1":
                _end_by_closing(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        self._is_in_head = True
        self._num_line_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Refuse input that can't be parsed, in OpenAI's form. uvicorn calls this method. Complete requests
        that came before the input are answered first."""
        if self._is_too_large:
            status, code = b"431 Request Header Fields Too Large", "headers_too_large"
            msg = (
                f"the request's URL and headers, or its trailers, have more than {self._max_bytes} bytes, "
                "which is the limit: send less, or raise the router's --max-header-size, which is in KiB"
            )
        else:
            status, code = b"400 Bad Request", "invalid_http"
        cast(FastAPI, self.config.app).state.refusals.count(int(status[:3]))
        self._tell(code, "sent an HTTP request that is malformed or too large")
        error = {"message": msg, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body)
        self._refusal = b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, headers, body)
        self._stop_waiting()
        if self.pipeline and self.cycle.more_body:  # the broken request is queued after others
            self.pipeline.popleft()
            self._client_ends.pop().answered()
            self.cycle = cast(RequestResponseCycle, self._previous_cycle)
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            self._refuse(self._refusal)

    def on_response_complete(self) -> None:
        if self._client_ends:
            self._client_ends.popleft().answered()
        super().on_response_complete()
        if not self._client_ends:
            self._place.waits()
        if self._refusal is not None and self.cycle.response_complete and not self.transport.is_closing():
            self._refuse(self._refusal)

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        self._tell("upgrade", "asked for another protocol, such as WebSocket, and is answered over HTTP")

    def _tell(self, what: str, message: str) -> None:
        host, port = self.client or ("?", 0)
        lines.write(
            logging.INFO, f"{what} from {host}", "%s: client %s %s", what, host_port(host, port), message
        )

    @property
    def _max_bytes(self) -> int:
        limit = self.config.h11_max_incomplete_event_size
        assert limit is not None
        return limit

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self._is_refused = True
        self.transport.close()

    def _refuse_above(self, num_bytes: int, what: str) -> None:
        """Raise ValueError if ``num_bytes`` is above the limit. The error ends the parsing, and uvicorn then
        calls :meth:`send_400_response`."""
        if num_bytes > self._max_bytes:
            self._is_too_large = True
            raise ValueError(f"{what} too large")

    def _may_send(self) -> bool:
        """Whether the client may still be sending a request that the router has already answered."""
        cycle = self.cycle
        return self._half_close is None and (self._is_refused or (cycle is not None and cycle.more_body))

    def _probe(self) -> bytes | None:
        """Return what :class:`HalfClose` may write now."""
        cycle = self.cycle
        if cycle.response_started:
            if self._client_ends and self._client_ends[0].keeps_head:
                return b""
            return COMMENT if cycle.chunked_encoding and not cycle.flow.write_paused else b""
        is_answered_next = not self.pipeline
        return CONTINUE if is_answered_next and self.scope["http_version"] == "1.1" else None

    def _await_head(self) -> None:
        self._head_timeout = self.loop.call_later(HEADER_TIMEOUT_S, self._on_head_timeout)

    def _stop_waiting(self) -> None:
        if self._head_timeout is not None:
            self._head_timeout.cancel()
            self._head_timeout = None

    def _on_head_timeout(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Make the end of the connection mark the end of an answer of unknown length, because HTTP/1.0 has no
    chunks (RFC 9112, section 6.1). Such a connection is closed after each answer."""
    send = cycle.send
    is_open_ended = False

    async def send_unchunked(message: Any) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if is_open_ended:
                cycle.chunked_encoding = False
        elif is_open_ended:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]
