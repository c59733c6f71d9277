"""Which connection is closed when there are too many, and that connections without a request shut nobody
out."""

import asyncio

import pytest

from router.access.client import site_of
from router.http.connections import open_connections
from router.http.connections.open_connections import OpenConnections, room_for
from testing.certificates import Authority
from testing.conditions import TIMEOUT_S, until

ATTACKER, VICTIM = "127.0.0.2", "127.0.0.1"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


class Client:
    """Opens connections of one address, and notes which of them were closed."""

    def __init__(self, connections: OpenConnections, host: str) -> None:
        self._connections, self._host = connections, host
        self.places = []
        self.closed = []

    def open(self):
        number = len(self.places)
        self.places.append(None)
        self.places[number] = self._connections.opened(self._host, lambda: self.closed.append(number))
        return self.places[number]


def figures(connections: OpenConnections) -> list[float]:
    return [metric.samples[0].value for metric in connections.collect()]


def test_the_oldest_idle_one_of_the_address_with_most_makes_room():
    connections = OpenConnections(site_of, room=8)
    first, second, victim = (Client(connections, host) for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    for _ in range(4):
        first.open()
    for _ in range(4):
        second.open()
    second.places[0].works()
    for _ in range(3):
        victim.open().works()
    assert (first.closed, second.closed, victim.closed) == ([0, 1], [1], [])
    assert figures(connections) == [8, 3]


def test_an_address_has_half_and_closes_its_own():
    connections = OpenConnections(site_of, room=8)
    client, other = Client(connections, "10.0.0.1"), Client(connections, "10.0.0.2")
    other.open()
    for _ in range(4):
        client.open().works()
    client.places[1].waits()
    client.open()
    assert client.closed == [1], "a kept one goes before the new one"
    client.open()
    assert client.closed == [1, 4]
    client.places[5].works()
    client.open()
    assert client.closed == [1, 4, 6], "requests under way are never closed"
    assert not other.closed


def test_silent_ones_have_a_limit_of_their_own(monkeypatch):
    monkeypatch.setattr(open_connections, "MAX_SILENT", 3)
    connections = OpenConnections(site_of, room=100)
    client = Client(connections, "fd00::1")
    neighbour = Client(connections, "fd00::2")  # of the same network
    for _ in range(2):
        client.open()
        neighbour.open()
    assert (client.closed, neighbour.closed) == ([0], [])
    for place in (*client.places, *neighbour.places):
        place.left()
        place.left()
    assert figures(connections) == [0, 1]


def test_some_files_are_for_others():
    assert [room_for(limit) for limit in (64, 512, 1024, 8192, 1 << 20)] == [16, 384, 896, 7168, 1 << 16]


@pytest.fixture
async def https_stack(make_stack, tmp_path):
    authority = Authority()
    stack = await make_stack(ready=False, certificate=authority.write(tmp_path, "a.example.com"))
    stack.app.state.connections.room = 32
    return stack, authority.client()


async def test_handshakes_that_never_come_shut_nobody_out(https_stack):
    stack, trust = https_stack
    connections, port = stack.app.state.connections, int(stack.url.rpartition(":")[2])
    silent = [
        await asyncio.open_connection(VICTIM, port, local_addr=(ATTACKER, 0), limit=1 << 10)
        for _ in range(64)
    ]
    await until(lambda: figures(connections)[1] >= 48)
    reader, writer = await asyncio.open_connection(VICTIM, port, ssl=trust)
    writer.write(HEALTH + b"Connection: close\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), TIMEOUT_S)).startswith(b"HTTP/1.1 200")
    for closed, _ in silent[:48]:
        assert await asyncio.wait_for(closed.read(), TIMEOUT_S) == b""
    for _, each in silent:
        each.close()
    writer.close()
    await until(lambda: figures(connections)[0] == 0)
