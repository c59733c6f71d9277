"""A gRPC message that can't be read: its sender is told why, and the log says who it was."""

import logging

import grpc.aio
import pytest

from wire.codec import decode
from wire.messages.generation import Describe, ErrorReply, ServerInfo
from wire.rpc import DESCRIBE, SERVER_SERVICE, lines, service, unary_handler


async def test_the_log_names_the_sender_and_counts_what_more_it_sends(caplog):
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        lines.tell()
    caplog.clear()

    async def describe(_request: Describe, _context: object) -> ServerInfo:
        raise AssertionError("it was read")

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (service(SERVER_SERVICE, {DESCRIBE.name: unary_handler(DESCRIBE, describe)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(4):
                reply = decode(await channel.unary_unary(DESCRIBE.path)(b"\xff\xff"), ErrorReply)
                assert reply.code == "malformed_message"
    finally:
        await server.stop(None)
    told = [one for one in caplog.records if "Describe from ipv4:127.0.0.1:" in one.getMessage()]
    assert len(told) == 4
    assert [one.levelno for one in told if one.levelno > logging.DEBUG] == [logging.WARNING]


@pytest.fixture(autouse=True)
def _quiet():
    yield
    for _ in range(2):
        lines.tell()
