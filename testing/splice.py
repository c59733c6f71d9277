"""Joins two connections into one."""

from __future__ import annotations

import asyncio
import contextlib

CHUNK_BYTES = 1 << 16

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def splice(near: Connection, far: Connection) -> None:
    """Passes bytes on in both directions until one side has ended. The caller closes both."""
    both = [
        asyncio.ensure_future(_pass_on(near[0], far[1])),
        asyncio.ensure_future(_pass_on(far[0], near[1])),
    ]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in both:
            one.cancel()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
