"""Servers that can't be reached for a handshake: an error that says so, after which a router tries others."""

from __future__ import annotations

import socket

import pytest

from kv_transfer.failure_counts import FailureCounts
from kv_transfer.peers import Peers
from wire.errors import TransferError, UnavailableError
from wire.handoff import Ticket


@pytest.fixture
def silent_port():
    """Takes connections, as behind a link that was cut later, and never answers."""
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
