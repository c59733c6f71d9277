"""Somebody else's OpenAI endpoint, over real HTTP, that answers and fails as a script says.

with openai_endpoint(lambda call: Reply(200, {"choices": []})) as endpoint:
    endpoint.url, endpoint.calls
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Call:
    """One request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    """By lower-case name."""
    number: int
    """Counts the requests with this body, from 1."""


@dataclass(frozen=True)
class Reply:
    """One answer. A ``body`` that is a list is a stream of events; None cuts the connection."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class ScriptedEndpoint:
    """What it was asked so far."""

    answer: Callable[[Call], Reply]
    models: list[dict[str, Any]]
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def replied(self, call: Call) -> Reply:
        with self.lock:
            self.calls.append(call)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            return self.answer(call)
        finally:
            with self.lock:
                self.num_running -= 1

    def number_of(self, body: dict[str, Any]) -> int:
        """Returns how often this body came, this time included."""
        with self.lock:
            return 1 + sum(call.body == body for call in self.calls)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    endpoint: ScriptedEndpoint

    def do_GET(self) -> None:
        self._send(Reply(200, {"object": "list", "data": self.endpoint.models}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._send(self.endpoint.replied(Call(self.path, body, headers, self.endpoint.number_of(body))))

    def _send(self, reply: Reply) -> None:
        if reply.body is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        is_stream = isinstance(reply.body, list)
        kind, content = "application/json", json.dumps(reply.body).encode()
        if is_stream:
            kind = "text/event-stream"
            events = [one if isinstance(one, str) else json.dumps(one) for one in reply.body]
            content = "".join(f"data: {one}\n\n" for one in events).encode()
        self.send_response(reply.status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: tests end clients in the middle of answers."""


@contextmanager
def openai_endpoint(
    answer: Callable[[Call], Reply], *, owner: str = "somebody", port: int = 0
) -> Iterator[ScriptedEndpoint]:
    """An endpoint with the models ``large`` and ``small``."""
    models = [{"id": name, "object": "model", "owned_by": owner} for name in ("large", "small")]
    endpoint = ScriptedEndpoint(answer, models)
    server = _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"endpoint": endpoint}))
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
