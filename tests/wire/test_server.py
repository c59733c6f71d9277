"""How a gRPC server process ends: after a signal with a drain, after a fault without waiting for anything."""

import asyncio

import pytest

import wire.server
from testing.conditions import PROMPT_S
from wire.errors import DeviceFaultError
from wire.rpc import SERVER_OPTIONS
from wire.server import GrpcServer


class Drain:
    """A drain that waits for an engine which never answers."""

    def __init__(self):
        self.has_begun = asyncio.Event()

    async def __call__(self):
        self.has_begun.set()
        await asyncio.Event().wait()


async def test_a_fault_ends_a_drain_that_waits_for_the_engine():
    server, drain = GrpcServer("127.0.0.1", 0), Drain()
    await server.start()
    ending = asyncio.create_task(server.wait_until_stopped(drain))
    server.stop()
    async with asyncio.timeout(PROMPT_S):
        await drain.has_begun.wait()
        assert server.health.state == "stopping"
        server.fail(DeviceFaultError("the GPU failed"))
        with pytest.raises(DeviceFaultError, match="the GPU failed"):
            await ending


async def test_nothing_is_drained_after_a_fault():
    server, drain = GrpcServer("127.0.0.1", 0), Drain()
    await server.start()
    server.fail(DeviceFaultError("the GPU failed"))
    async with asyncio.timeout(PROMPT_S):
        with pytest.raises(DeviceFaultError):
            await server.wait_until_stopped(drain)
    assert not drain.has_begun.is_set()


async def test_an_error_of_the_drain_is_not_lost():
    async def fail():
        raise ValueError("a bug")

    server = GrpcServer("127.0.0.1", 0)
    await server.start()
    server.stop()
    async with asyncio.timeout(PROMPT_S):
        with pytest.raises(ValueError, match="a bug"):
            await server.wait_until_stopped(fail)
        await server.wait_until_stopped()


async def test_a_connection_that_never_shakes_hands_is_closed(monkeypatch):
    options = dict(SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] == 10_000
    options["grpc.server_handshake_timeout_ms"] = 100
    monkeypatch.setattr(wire.server, "SERVER_OPTIONS", list(options.items()))
    server = GrpcServer("127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(PROMPT_S):
        await reader.read()  # to its end
        writer.close()
        server.stop()
        await server.wait_until_stopped()
