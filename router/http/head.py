"""Answers HEAD on every path that answers GET."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a HEAD with the status and headers of a GET, without the body.

    The application sees a GET, so that no route can forget HEAD. The call of the application is cancelled
    once the headers are sent, because a stream of events would never end by itself.
    """
    answered = asyncio.Event()

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})
            answered.set()

    getting = asyncio.ensure_future(app({**scope, "method": "GET"}, receive, send_head))
    watching = asyncio.ensure_future(answered.wait())
    try:
        await asyncio.wait((getting, watching), return_when=asyncio.FIRST_COMPLETED)
        if not answered.is_set():
            await getting  # raises: it failed before it answered
    finally:
        getting.cancel()
        watching.cancel()
        await asyncio.gather(getting, watching, return_exceptions=True)
