"""Closed-loop load over raw sockets, cheap enough to share two cores with what it measures.

One thread, one ``epoll``. Events are counted, not parsed: a request is exact if its answer was a 200 with an
end, and if ``usage``, or else the number of its events, equals what was asked for.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TIMEOUT_S = 60.0
MARK = b'"finish_reason"'
"""Occurs once in each event of tokens."""
TAIL_BYTES = 400
"""More bytes than an event's part with the usage."""


class LoadError(Exception):
    """A request failed, or its answer was not what was asked for."""


@dataclass(frozen=True)
class Shape:
    """The common properties of a run's requests."""

    prompt: str
    num_tokens: int
    step_s: float = 0.0
    """Time between two steps of the workers; 0 for none."""
    fields: tuple[tuple[str, object], ...] = ()

    def request(self, model: str, host: str) -> bytes:
        body = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "seed": round(self.step_s * 1e6),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body | dict(self.fields)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class Result:
    """Times in seconds."""

    duration_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    """From sending a request to its first event."""
    total_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Times between two reads that brought events of one request."""
    num_tokens: int = 0
    num_events: int = 0
    client_cpu_s: float = 0.0
    steady_events: int = 0
    """Number of events while all requests were streaming: from the last request's first event to the first
    request's last event."""


@dataclass(eq=False)
class Stream:
    """One connection and its present request."""

    socket: socket.socket
    request: bytes
    sent: float = 0.0
    last: float = 0.0
    num_events: int = 0
    unread: bytes = b""
    """Received bytes of a head or chunk that is not complete yet."""
    tail: bytes = b""
    """The body's latest bytes, because an event may be cut in two."""
    has_head: bool = False


class Load:
    """``concurrency`` connections, spread over ``ports``, each with one request after another."""

    def __init__(self, ports: Sequence[int], model: str, shape: Shape, *, concurrency: int) -> None:
        self._num_tokens = shape.num_tokens
        self._selector = selectors.DefaultSelector()
        self._result = Result()
        self._left = 0
        self._is_steady = False
        self._on_steady: Callable[[], None] = lambda: None
        self._streams: list[Stream] = []
        for i in range(concurrency):
            port = ports[i % len(ports)]
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = Stream(connection, shape.request(model, f"127.0.0.1:{port}"))
            self._selector.register(connection, selectors.EVENT_READ, stream)
            self._streams.append(stream)

    def run(self, num_requests: int, on_steady: Callable[[], None] = lambda: None) -> Result:
        """Sends ``num_requests`` requests. Raises :class:`LoadError` if one of them is not answered in full.

        ``on_steady`` is called when all streams have had their first event, and when the first stream has
        ended.
        """
        result = self._result = Result()
        self._on_steady = on_steady
        self._is_steady = False
        self._left = num_requests
        started, cpu_started = time.perf_counter(), time.process_time()
        for stream in self._streams[:num_requests]:
            self._send(stream)
        while len(result.total_s) < num_requests:
            ready = self._selector.select(TIMEOUT_S)
            if not ready:
                raise LoadError(f"nothing came for {TIMEOUT_S:g} s")
            for key, _ in ready:
                self._read(key.data)
        result.duration_s = time.perf_counter() - started
        result.client_cpu_s = time.process_time() - cpu_started
        return result

    def close(self) -> None:
        for stream in self._streams:
            stream.socket.close()
        self._selector.close()

    def _send(self, stream: Stream) -> None:
        if self._left:
            self._left -= 1
            stream.sent, stream.last, stream.num_events = time.perf_counter(), 0.0, 0
            stream.unread, stream.tail, stream.has_head = b"", b"", False
            stream.socket.sendall(stream.request)

    def _read(self, stream: Stream) -> None:
        data = stream.socket.recv(1 << 18)
        now, result = time.perf_counter(), self._result
        if not data:
            raise LoadError(f"a connection was closed; the last that came: {stream.tail!r}")
        body, has_ended = _body(stream, data)
        news = stream.tail + body
        num_events = news.count(MARK)
        if num_events:
            if stream.last:
                result.gaps_s.append(now - stream.last)
            else:
                result.first_s.append(now - stream.sent)
                if len(result.first_s) == len(self._streams) and not result.total_s:
                    self._is_steady = True
                    self._on_steady()
            stream.last = now
            stream.num_events += num_events
            if self._is_steady:
                result.steady_events += num_events
        if has_ended:
            self._finish(stream, news, now)
        else:
            stream.tail = news[max(news.rfind(MARK) + 1, len(news) - TAIL_BYTES, 0) :]

    def _finish(self, stream: Stream, tail: bytes, now: float) -> None:
        if b"data: [DONE]" not in tail:
            raise LoadError(f"a stream ended without [DONE]: {tail!r}")
        result = self._result
        if self._is_steady:
            self._is_steady = False
            self._on_steady()
        _, usage, told = tail.partition(b'"completion_tokens":')
        num_tokens = int(told.partition(b",")[0]) if usage else stream.num_events
        if num_tokens != self._num_tokens:
            raise LoadError(f"asked for {self._num_tokens} tokens, got {num_tokens}")
        result.total_s.append(now - stream.sent)
        result.num_tokens += num_tokens
        result.num_events += stream.num_events
        self._send(stream)


def _body(stream: Stream, data: bytes) -> tuple[bytes, bool]:
    """Returns the new part of a chunked body, and whether the body has ended."""
    data = stream.unread + data
    start = 0
    if not stream.has_head:
        if not data.startswith(b"HTTP/1.1 200"[: len(data)]):
            raise LoadError(f"answered with {data[:600]!r}")
        start = data.find(b"\r\n\r\n") + 4
        if start < 4:
            stream.unread = data
            return b"", False
        stream.has_head = True
    parts = []
    while (line_end := data.find(b"\r\n", start)) >= 0:
        num_bytes = int(data[start:line_end], 16)
        end = line_end + 2 + num_bytes
        if len(data) < end + 2:
            break
        if not num_bytes:
            return b"".join(parts), True
        parts.append(data[line_end + 2 : end])
        start = end + 2
    stream.unread = data[start:]
    return b"".join(parts), False
