"""Streams to slow clients: what is written at once, what waits, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from router.api.openai.chunks import error_end
from router.http import disconnect
from router.http.client_end import ClientEnd, client_end_of
from router.http.disconnect import WhileConnected
from router.http.event_stream import DONE, EventStream, LastWrite, WriteNow
from wire.errors import CancelledRequestError


async def stays():
    await asyncio.Event().wait()


class Cycle:
    """What uvicorn keeps of a request: the state of its answer, and where it is written."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.flow = SimpleNamespace(write_paused=is_slow)
        self.response_started = False
        self.transport = SimpleNamespace(write=lambda data: self.sent.append(unchunked(data)))
        self.chunked_encoding = None
        self.sent: list[bytes] = []


def unchunked(data: bytes) -> bytes:
    size, _, rest = data.partition(b"\r\n")
    assert len(rest) == int(size, 16) + 2
    return rest[:-2]


def scope_of(cycle: Any) -> dict[str, Any]:
    scope: dict[str, Any] = {"type": "http"}
    ClientEnd(cycle).put_into(scope)
    return scope


async def test_what_a_slow_client_does_not_take_at_once_is_left_to_the_task():
    cycle = Cycle()
    drained = asyncio.Event()
    outcomes: list[bool] = []

    async def send(message):
        cycle.chunked_encoding = True
        if cycle.flow.write_paused:
            await drained.wait()
        cycle.sent.append(message.get("body", b"start"))

    async def writes(write_now: WriteNow) -> AsyncGenerator[bytes, None]:
        outcomes.append(write_now(b"too early"))
        yield b"1"
        outcomes.append(write_now(b"2"))
        cycle.flow.write_paused = True  # the socket's buffer is full
        outcomes.append(write_now(b"3"))
        asyncio.get_running_loop().call_soon(drained.set)
        yield b"3"
        yield LastWrite(DONE)

    await EventStream(writes, error_end)(scope_of(cycle), stays, send)
    assert outcomes == [False, True, False]
    assert cycle.sent == [b"start", b"1", b"2", b"3", DONE]


async def test_a_client_that_takes_nothing_ends_its_stream(monkeypatch):
    monkeypatch.setattr(disconnect, "WRITE_TIMEOUT_S", 0.02)

    async def stuck():
        with WhileConnected(scope_of(Cycle(is_slow=True))) as connected:
            connected.write_began()
            await stays()

    with pytest.raises(CancelledRequestError, match="took nothing"):
        await stuck()


async def test_no_time_counts_between_two_writes(monkeypatch):
    monkeypatch.setattr(disconnect, "WRITE_TIMEOUT_S", 0.01)
    with WhileConnected(scope_of(Cycle(is_slow=True))) as connected:
        connected.write_began()
        connected.write_ended()
        await asyncio.sleep(0.05)  # longer than the limit, however slow the machine is


async def test_a_client_that_goes_away_ends_what_runs_for_it():
    scope = scope_of(Cycle())

    async def work():
        with WhileConnected(scope):
            await stays()

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    client_end_of(scope).lost()
    with pytest.raises(CancelledRequestError, match="went away"):
        await working
    with pytest.raises(CancelledRequestError, match="went away"):
        await work()  # that begins when the client has already gone


async def test_the_head_of_an_answer_leaves_with_its_first_part():
    written: list[bytes] = []
    cycle = Cycle()
    cycle.transport = SimpleNamespace(write=written.append, close=lambda: written.append(b"closed"))
    ClientEnd(cycle)
    cycle.transport.write(b"head ")
    assert written == []
    cycle.transport.write(b"first")
    cycle.transport.write(b"second")
    assert written == [b"head first", b"second"]


@pytest.mark.parametrize("closes", [False, True])
async def test_a_head_without_a_body_leaves_by_itself(closes):
    written: list[bytes] = []
    cycle = Cycle()
    cycle.transport = SimpleNamespace(write=written.append, close=lambda: written.append(b"closed"))
    ClientEnd(cycle)
    cycle.transport.write(b"head")
    if closes:
        cycle.transport.close()
    else:
        await asyncio.sleep(0)
    assert written == [b"head", b"closed"][: 1 + closes]
