"""A router that starts amid a rollout to another protocol becomes ready with half of the servers."""

import grpc.aio
import msgpack
import pytest

from testing.conditions import until
from wire.codec import PROTOCOL_VERSION
from wire.rpc import SERVER_OPTIONS, SERVER_SERVICE


async def describe_in_next_version(_request, _context):
    return msgpack.packb([PROTOCOL_VERSION + 1, "ServerInfo", []])


@pytest.fixture
async def other_port():
    """The port of a decode server of the next release."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    methods = {"Describe": grpc.unary_unary_rpc_method_handler(describe_in_next_version)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVER_SERVICE, methods),))
    port = server.add_insecure_port("0.0.0.0:0")  # each loopback address stands for a pod
    await server.start()
    yield port
    await server.stop(None)


async def test_it_leaves_requests_to_routers_of_the_release_that_most_servers_have(make_cloud, other_port):
    cloud = await make_cloud()
    for number in (1, 2):
        cloud.api.create_pod(f"old-{number}", port=other_port, ip=f"127.0.0.{number}")
    cloud.add("prefill-0", cloud.stack.prefill[0])
    cloud.add("decode-0", cloud.stack.decode[0])
    await until(lambda: cloud.pool.not_ready_reason() is None and cloud.pool.is_outnumbered)
    answer = await cloud.stack.client.get("/readyz")
    assert (answer.status_code, "of another release" in answer.text) == (503, True)
    assert (await cloud.stack.complete(prompt=[5, 6, 7])).status_code == 200, "whoever asks it is served"

    cloud.api.delete_pod("old-1")
    await until(lambda: not cloud.pool.is_outnumbered)
    assert (await cloud.stack.client.get("/readyz")).status_code == 200

    for number in (3, 4):
        cloud.api.create_pod(f"old-{number}", port=other_port, ip=f"127.0.0.{number}")
    await until(lambda: cloud.pool.is_outnumbered)
    assert (await cloud.stack.client.get("/readyz")).status_code == 200, "once it is ready, it stays so"
