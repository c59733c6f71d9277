"""The HTTP server accepts many connections in one iteration of the event loop."""

import asyncio
import json
import socket

import uvloop

from router.app import create_app
from router.config import ModelSource, RouterConfig
from router.http.server import ACCEPTED_AT_ONCE, CUT, HttpServer
from testing.conditions import until
from testing.router.scripted_servers import hanging
from testing.router.tokenizers import write_model_dir

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


async def test_what_is_left_at_the_end_of_grace_is_told_to_come_again(make_stack):
    """Queued, in one piece, and in the middle of a stream: none is cut without a word."""
    stack = await make_stack(shutdown_grace_s=0.5, max_requests_in_flight=2)
    stack.decode[0].script = hanging
    began = asyncio.create_task(stack.complete(stream=True))
    whole = asyncio.create_task(stack.complete())
    await until(lambda: len(stack.decode[0].submitted) == 2)
    queued = asyncio.create_task(stack.complete())
    await until(lambda: stack.gate.num_waiting == 1)
    stack.app.state.drain.begin()
    for answer in (await whole, await queued):
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == CUT
        assert answer.headers["Retry-After"] == "1"
    *_, error, done = (await began).text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == CUT
    assert done == "data: [DONE]"
