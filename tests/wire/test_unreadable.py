"""A gRPC message that can't be read: its sender is told why, and the log says who it was."""

import logging

import grpc.aio
import pytest

from wire.codec import decode
from wire.messages.generation import Describe, ErrorReply, ServerInfo
from wire.rpc import (
    CHANNEL_OPTIONS,
    DESCRIBE,
    MAX_CALL_BYTES,
    SERVER_OPTIONS,
    SERVER_SERVICE,
    lines,
    service,
    unary_handler,
)


async def describe_by(message: bytes) -> bytes:
    """Returns what a server answers to this request of Describe."""

    async def describe(_request: Describe, _context: object) -> ServerInfo:
        raise AssertionError("it was read")

    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(
        (service(SERVER_SERVICE, {DESCRIBE.name: unary_handler(DESCRIBE, describe)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            reply: bytes = await channel.unary_unary(DESCRIBE.path)(message)
            return reply
    finally:
        await server.stop(None)


async def test_a_call_of_too_many_bytes_is_refused_unread():
    """Millions of empty lists would take seconds and gigabytes to unpack."""
    lists = b"\xdd" + MAX_CALL_BYTES.to_bytes(4, "big") + b"\x90" * MAX_CALL_BYTES
    reply = decode(await describe_by(lists), ErrorReply)
    assert reply.code == "malformed_message"
    assert f"to Describe exceeds the limit of {MAX_CALL_BYTES}" in reply.message


async def test_the_log_names_the_sender_and_counts_what_more_it_sends(caplog):
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        lines.tell()
    caplog.clear()

    for _ in range(4):
        reply = decode(await describe_by(b"\xff\xff"), ErrorReply)
        assert reply.code == "malformed_message"
    told = [one for one in caplog.records if "Describe from ipv4:127.0.0.1:" in one.getMessage()]
    assert len(told) == 4
    assert [one.levelno for one in told if one.levelno > logging.DEBUG] == [logging.WARNING]


@pytest.fixture(autouse=True)
def _quiet():
    yield
    for _ in range(2):
        lines.tell()
