"""The HTTP server accepts many connections in one iteration of the event loop."""

import asyncio
import socket

import uvloop

from router.app import create_app
from router.config import ModelSource, RouterConfig
from router.http_server import ACCEPTED_AT_ONCE, HttpServer
from tests.router.tokenizers_for_tests import write_model_dir

NUM_CONNECTIONS = 4 * ACCEPTED_AT_ONCE


async def iterations_to_answer_all(config) -> int:
    app = create_app(config)
    server = HttpServer(app, config, app.state.drain)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(NUM_CONNECTIONS)]
    for client in clients:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        client.setblocking(False)
    count = 0
    waiting = set(clients)
    while waiting:
        await asyncio.sleep(0)
        count += 1
        for client in list(waiting):
            try:
                answer = client.recv(1 << 16)
            except BlockingIOError:
                continue
            assert answer.startswith(b"HTTP/1.1 200")
            waiting.remove(client)
            client.close()
    server.should_exit = True
    await serving
    return count


def test_connections_do_not_wait_an_iteration_for_each_one_before_them(tmp_path):
    """libuv, which serves in production, accepts one in an iteration for each handle that listens."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        config = RouterConfig(
            models=(ModelSource("tiny", write_model_dir(tmp_path)),),
            decode_addresses=("localhost:1",),
            port=0,
        )
        assert runner.run(iterations_to_answer_all(config)) < NUM_CONNECTIONS / 2
