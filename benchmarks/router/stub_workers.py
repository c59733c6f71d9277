"""Workers without a model, for measuring routers. They answer at once, or at one token per step time.

    python -m benchmarks.router.stub_workers grpc --port 9001    # a server of both roles, as Twinfang's
    python -m benchmarks.router.stub_workers sse --port 9002     # OpenAI completions over HTTP

Both take steps as an engine does: in each step, every running request gets one token. The gRPC worker sends
one message per step, or one for several steps while the router is busy. The SSE worker writes one event to
each request's connection, whose buffers collect events in the same way. A request's ``seed`` is the time
between two steps in microseconds; 0 for none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import selectors
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from typing import Any

from decode_server.stream import RouterStream
from prefill_server.stream import RouterStreams
from wire.gathered import messages_in
from wire.messages.generation import (
    Cancel,
    DrainNews,
    Empty,
    PrefillReply,
    PrefillRequest,
    RequestOutput,
    RequestStats,
    ServerInfo,
    ServerStats,
    SetDraining,
    Submit,
)
from wire.messages.handoff import Role, Ticket
from wire.messages.prefixes import PrefixNews
from wire.messages.purge import PurgeNews, PurgePrefixes
from wire.messages.sessions import SessionNews, TendSession
from wire.rpc import (
    ABANDON,
    DECODE_SERVICE,
    PREFILL_SERVICE,
    StreamRequest,
    decode_stream_request,
    stream_handler,
    unary_handler,
)
from wire.server import GrpcServer

VOCAB_SIZE, MAX_MODEL_LEN = 1024, 1 << 20
MODEL = "stub"
TOKEN_IDS = tuple(range(300, 700))
"""Merged tokens of the bundled tokenizer, with two to six characters of text each."""


# --- over Twinfang's wire -------------------------------------------------------------------------


class GrpcWorker:
    """A server of ``role`` that steps over all requests of a router at once."""

    def __init__(self, role: Role, port: int, num_rows: int) -> None:
        self._role: Role = role
        self._num_rows = num_rows
        self._port = port

    async def serve(self) -> None:
        server = GrpcServer("127.0.0.1", self._port)
        prefill = {
            "Stream": stream_handler(RouterStreams(self._prefill, self._drain_news).handle),
            ABANDON.name: unary_handler(ABANDON, _abandon),
        }
        server.add_service(PREFILL_SERVICE, prefill)
        server.add_service(DECODE_SERVICE, {"Stream": stream_handler(self._stream)})
        server.add_server_service(self._describe, _stats, _prefixes, _set_draining, _tend_session, _purge)
        await server.start()
        await server.wait_until_stopped()

    def _describe(self) -> ServerInfo:
        return ServerInfo(
            role=self._role,
            incarnation=f"{self._role}-1",
            served_model_name=MODEL,
            fingerprint="stub",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            block_size=64,
            max_num_seqs=self._num_rows,
            eos_token_ids=(2,),
        )

    def _drain_news(self) -> DrainNews:
        return DrainNews(False, f"{self._role}-1")

    async def _prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillReply]:
        ticket = Ticket(
            request_id=request.request_id,
            lease_id=1,
            epoch=1,
            address=f"127.0.0.1:{self._port}",
            incarnation=f"{self._role}-1",
            num_tokens=len(request.token_ids) - 1,
            block_ids=tuple(range(1, 2 + len(request.token_ids) // 64)),
            state_slot=1,
            ttl_s=30.0,
        )
        yield PrefillReply(ticket, None, cached_tokens=0, queue_s=0.0, prefill_s=0.0)

    async def _stream(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        steps, stream = Steps(self._num_rows), RouterStream()
        tasks = [asyncio.create_task(one) for one in (steps.read(requests, stream), steps.run(stream))]
        try:
            async for data in stream.messages():
                yield data
        finally:
            for task in tasks:
                task.cancel()


class Steps:
    """The requests of one stream, and the steps taken over them."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._running: dict[str, tuple[int, int, int]] = {}
        """Request id → tokens sent, tokens asked for, start position in ``TOKEN_IDS``, which depends on the
        prompt."""
        self._has_work = asyncio.Event()
        self._interval_s = 0.0
        self._due = 0.0

    async def read(self, requests: AsyncIterator[bytes], stream: RouterStream) -> None:
        async for data in requests:
            for one in messages_in(data):
                self._take(decode_stream_request(one), stream)

    def _take(self, message: StreamRequest, stream: RouterStream) -> None:
        if isinstance(message, Submit):
            stream.begin(message.request_id, message.handle)
            self._running[message.request_id] = (0, message.params.max_tokens, sum(message.token_ids))
            self._interval_s = (message.params.seed or 0) / 1e6
            self._has_work.set()
        elif isinstance(message, Cancel):
            self._running.pop(message.request_id, None)
            stream.drop(message.request_id)

    async def run(self, stream: RouterStream) -> None:
        """Takes a step whenever one is due and there are requests; as fast as possible if the step time is 0.

        Outputs that a router does not read in time are sent together, as by a decode server.
        """
        while True:
            await asyncio.sleep(max(0.0, self._due - time.monotonic()))
            self._due = max(self._due + self._interval_s, time.monotonic())
            if self._running:
                stream.deliver([self._say(request_id) for request_id in self._rows()])
            else:
                self._has_work.clear()
                await self._has_work.wait()

    def _rows(self) -> list[str]:
        """Returns the oldest requests, as many as there are rows."""
        return list(islice(self._running, self._num_rows))

    def _say(self, request_id: str) -> RequestOutput:
        num_said, num_asked, start = self._running[request_id]
        token_ids = (TOKEN_IDS[(start + num_said) % len(TOKEN_IDS)],)
        if num_said + 1 < num_asked:
            self._running[request_id] = (num_said + 1, num_asked, start)
            return RequestOutput(request_id, token_ids)
        del self._running[request_id]
        return RequestOutput(request_id, token_ids, finish_reason="length", stats=RequestStats())


async def _stats() -> ServerStats:
    return ServerStats(**{f.name: 0 for f in fields(ServerStats) if f.default is MISSING})  # type: ignore[arg-type]


async def _prefixes(_since: int | None) -> PrefixNews:
    return PrefixNews(1, True)


async def _purge(_wanted: PurgePrefixes) -> PurgeNews:
    return PurgeNews(0, 0, 0)


async def _tend_session(_call: TendSession) -> SessionNews:
    return SessionNews(0, 0)


async def _set_draining(_message: SetDraining) -> None:
    pass


async def _abandon(_request: Any, _context: Any) -> Empty:
    return Empty()


# --- over HTTP ------------------------------------------------------------------------------------

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(text: str, finish_reason: str | None) -> bytes:
    """Returns an event as vLLM writes it."""
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
    }
    data = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [choice],
    }
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


TOKEN = _chunk(_event(" word", None))
LAST_TOKEN = _chunk(_event(" word", "length")) + _chunk(b"data: [DONE]\n\n") + LAST_CHUNK


@dataclass(eq=False)
class Client:
    """One connection from a router."""

    socket: socket.socket
    received: bytes = b""
    unsent: bytes = b""
    left: int = 0
    """Tokens of its request that are still to be sent."""
    is_closed: bool = False


class SseWorker:
    """HTTP/1.1 by hand on one thread, with few costs besides system calls, so that mainly the router is
    measured."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._running: list[Client] = []
        self._interval_s = 0.0
        self._due = 0.0

    def serve(self) -> None:
        while True:
            timeout_s = max(0.0, self._due - time.monotonic()) if self._running else None
            for key, _ in self._selector.select(timeout_s):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if self._running and time.monotonic() >= self._due:
                self._due = max(self._due + self._interval_s, time.monotonic())
                self._step()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ, Client(connection))

    def _read(self, client: Client) -> None:
        try:
            data = client.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            client.is_closed = True
            self._selector.unregister(client.socket)
            client.socket.close()
            return
        client.received += data
        head, separator, rest = client.received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        num_bytes = int(length[1]) if length else 0
        if separator and len(rest) >= num_bytes:
            client.received = rest[num_bytes:]
            self._answer(client, head, rest[:num_bytes])

    def _answer(self, client: Client, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST"):
            told = {"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL}
            answer = json.dumps(told).encode()
            client.unsent = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(answer), answer)
            )
            self._send(client)
            return
        asked = json.loads(body)
        client.left = asked["max_tokens"]
        client.unsent = HEAD
        self._interval_s = (asked.get("seed") or 0) / 1e6
        self._running.append(client)

    def _step(self) -> None:
        running = []
        for client in self._running:
            if client.is_closed:
                continue
            if client.unsent and client.unsent is not HEAD and not self._send(client):
                running.append(client)  # the router is slower: this connection misses the step
                continue
            client.left -= 1
            client.unsent += TOKEN if client.left else LAST_TOKEN
            if not self._send(client) or client.left:
                running.append(client)
        self._running = [client for client in running if client.left or client.unsent]

    def _send(self, client: Client) -> bool:
        try:
            num_sent = client.socket.send(client.unsent)
        except BlockingIOError:
            return False
        except ConnectionError:
            client.unsent, client.left = b"", 0
            return True
        client.unsent = client.unsent[num_sent:]
        return not client.unsent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("grpc", "sse"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--role", choices=("both", "prefill", "decode"), default="both")
    parser.add_argument("--rows", type=int, default=4096, help="requests of a router that run at once")
    options = parser.parse_args()
    if options.kind == "sse":
        SseWorker(options.port).serve()
    else:
        asyncio.run(GrpcWorker(options.role, options.port, options.rows).serve())


if __name__ == "__main__":
    main()
