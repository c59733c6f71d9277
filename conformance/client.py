"""A client that sends many requests at once, and can go away in the middle of any."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx

TICK_S = 0.05


@dataclass(frozen=True)
class Reply:
    """What a client got."""

    status: int
    """The HTTP status; 0 if there was no answer at all."""
    token_ids: tuple[int, ...] = ()
    error: str = ""
    seconds: float = 0.0
    is_hang: bool = False
    """Whether there was no answer within the deadline."""


class Client:
    """Sends requests from an event loop in a thread of its own. Cancelling a future closes its connection.

    ``late_s`` is the longest time for which this loop got no core when it should have gone on.
    """

    def __init__(self, url: str, deadline_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._url, self._deadline_s, self.loop = url, deadline_s, loop
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self.late_s = 0.0

    def send(self, body: dict[str, Any]) -> Future[Reply]:
        return asyncio.run_coroutine_threadsafe(self._ask(body), self.loop)

    async def watch(self) -> None:
        """Measures how late the loop is, until this task is cancelled."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_s = max(self.late_s, time.monotonic() - due)

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, body: dict[str, Any]) -> Reply:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s):
                response = await self._http.post(f"{self._url}/v1/completions", json=body)
        except TimeoutError:
            return Reply(
                0, error=f"no answer within {self._deadline_s:g} s", is_hang=True, seconds=self._deadline_s
            )
        except httpx.HTTPError as error:
            return Reply(0, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - started)
        return _reply(response, time.monotonic() - started)


def _reply(response: httpx.Response, seconds: float) -> Reply:
    if response.status_code != 200:
        return Reply(response.status_code, error=response.text[:300], seconds=seconds)
    try:
        choice = response.json()["choices"][0]
        tokens = tuple(choice["token_ids"])
    except (json.JSONDecodeError, LookupError, TypeError):
        return Reply(200, error=f"not a completion: {response.text[:300]}", seconds=seconds)
    if choice.get("finish_reason") == "error":
        return Reply(200, error="finish_reason is error", seconds=seconds)
    return Reply(200, tokens, seconds=seconds)


@contextlib.contextmanager
def connected(url: str, deadline_s: float) -> Iterator[Client]:
    """Yields a client; cancels what is under way in the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="client")
    thread.start()
    client = Client(url, deadline_s, loop)
    asyncio.run_coroutine_threadsafe(client.watch(), loop)
    try:
        yield client
    finally:
        asyncio.run_coroutine_threadsafe(_end(client), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(client: Client) -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.close()
