"""Ports for servers to be started."""

from __future__ import annotations

import socket

import pytest

from twinfang.ports import EPHEMERAL_RANGE, free_ports, require_free
from wire.errors import ConfigError


def test_free_ports_are_different_and_can_be_listened_on():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
            server.listen()


def test_no_outgoing_connection_can_take_them():
    first_ephemeral = int(EPHEMERAL_RANGE.read_text().split()[0])
    assert all(port < first_ephemeral for port in free_ports(20))


def test_a_port_in_use_is_refused_by_name():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: .*choose another"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)
