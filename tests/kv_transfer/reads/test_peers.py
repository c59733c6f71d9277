"""Servers that can't be reached for a handshake: the error says so, and a router then tries other servers."""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio
import pytest

from kv_transfer.reads.failure_counts import FailureCounts
from kv_transfer.reads.peers import Peers
from twinfang.stack.ports import free_ports
from wire.errors import HandshakeError, TransferError, UnavailableError
from wire.messages.handoff import Ticket
from wire.rpc import HANDSHAKE, SERVER_OPTIONS, TRANSFER_SERVICE, service, unary_handler


@pytest.fixture
def silent_port():
    """Accepts connections and never answers, like a server whose link was cut after the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("refuses", "timeout_s", "expected", "cause"),
    [(True, 30.0, UnavailableError, "peer_gone"), (False, 0.5, TransferError, "deadline")],
)
async def test_a_server_out_of_reach_is_named(sink, silent_port, refuses, timeout_s, expected, cause):
    address = "127.0.0.1:1" if refuses else f"127.0.0.1:{silent_port}"
    failures = FailureCounts()
    ticket = Ticket("r", 0, 1, address, "source", 16, (1,), 1, 1.0, None)
    peers = Peers(sink, failures, timeout_s=timeout_s)
    with pytest.raises(expected, match=f"the server at {address} is out of reach: Handshake"):
        await peers.ensure(ticket)
    await peers.close()
    assert failures.counts()[cause] == 1


async def test_a_server_that_has_just_come_back_is_waited_for(sink):
    """gRPC pauses between two tries to connect; the server is there before the next one."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    peers = Peers(sink, FailureCounts(), timeout_s=30.0)
    asked = asyncio.create_task(peers.ensure(Ticket("r", 0, 1, address, "source", 16, (1,), 1, 1.0, None)))
    channel = peers._channel(address)
    while (state := channel.get_state()) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        await asyncio.wait_for(channel.wait_for_state_change(state), 20)

    async def refuse(_request, _context):
        raise HandshakeError("it is back, and no friend of yours")

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {HANDSHAKE.name: unary_handler(HANDSHAKE, refuse)}
    server.add_generic_rpc_handlers((service(TRANSFER_SERVICE, handlers),))
    server.add_insecure_port(address)
    await server.start()
    with pytest.raises(HandshakeError, match="it is back"):
        await asked
    await peers.close()
    await server.stop(None)
