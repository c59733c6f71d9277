"""Streams to slow clients: what is written at once, what waits, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from router.api.openai.chunks import error_end
from router.http import disconnect
from router.http.connection import WRITE_PART, WritePart
from router.http.disconnect import WriteLimit
from router.http.event_stream import DONE, EventStream, LastWrite
from wire.errors import CancelledRequestError

SCOPE: dict[str, Any] = {"type": "http"}


async def stays():
    await asyncio.Event().wait()


async def test_what_a_slow_client_does_not_take_at_once_is_left_to_the_task():
    sent: list[bytes] = []
    is_slow, drained = False, asyncio.Event()  # the socket's buffer is full
    outcomes: list[bool] = []

    async def send(message):
        if is_slow:
            await drained.wait()
        sent.append(message.get("body", b"start"))

    def write_part(data: bytes) -> bool:
        if not is_slow:
            sent.append(data)
        return not is_slow

    async def writes(write_now: WritePart) -> AsyncGenerator[bytes, None]:
        nonlocal is_slow
        outcomes.append(write_now(b"too early"))
        yield b"1"
        outcomes.append(write_now(b"2"))
        is_slow = True
        outcomes.append(write_now(b"3"))
        asyncio.get_running_loop().call_soon(drained.set)
        yield b"3"
        yield LastWrite(DONE)

    await EventStream(writes, error_end)(SCOPE | {WRITE_PART: write_part}, stays, send)
    assert outcomes == [False, True, False]
    assert sent == [b"start", b"1", b"2", b"3", DONE]


async def test_a_client_that_takes_nothing_ends_its_stream(monkeypatch):
    monkeypatch.setattr(disconnect, "WRITE_TIMEOUT_S", 0.02)

    async def stuck():
        async with WriteLimit() as limit:
            limit.began()
            await stays()

    with pytest.raises(CancelledRequestError, match="took nothing"):
        await stuck()


async def test_no_time_counts_between_two_writes(monkeypatch):
    monkeypatch.setattr(disconnect, "WRITE_TIMEOUT_S", 0.01)
    async with WriteLimit() as limit:
        limit.began()
        limit.ended()
        await asyncio.sleep(0.05)  # longer than the limit, however slow the machine is
