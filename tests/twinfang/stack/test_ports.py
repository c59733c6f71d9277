"""Ports for servers to be started."""

from __future__ import annotations

import socket

import pytest

from twinfang.stack import ports as ports_module
from twinfang.stack.ports import EPHEMERAL_RANGE, free_ports, ports_held, require_free
from wire.errors import ConfigError


def test_free_ports_are_different_and_can_be_listened_on():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
            server.listen()


def test_no_port_is_given_twice_and_none_that_is_held(monkeypatch):
    first_ephemeral = int(EPHEMERAL_RANGE.read_text().split()[0])
    monkeypatch.setattr(ports_module, "FIRST_PORT", first_ephemeral - 40)
    monkeypatch.setattr(ports_module, "MAX_TRIES", 40)
    first = free_ports(3)
    assert not set(first) & set(free_ports(3))
    monkeypatch.setattr(ports_module, "_given", set())  # another process knows nothing of this one's
    with ports_held([f"127.0.0.1:{port}" for port in first]):
        assert not set(first) & set(free_ports(15))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", first[0]))
            server.listen()
            socket.create_connection(("127.0.0.1", first[0]), timeout=10).close()
            with (
                pytest.raises(ConfigError, match=f"can't have 127.0.0.1:{first[0]}"),
                ports_held([f"127.0.0.1:{first[0]}"]),
            ):
                pass


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
