"""Ends the work for a client that has gone away, or that reads nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from starlette.types import Receive

from wire.errors import CancelledRequestError

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. If the client goes away first, cancel ``work`` and raise
    :class:`CancelledRequestError`.

    The request's body must have been read before this call.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise CancelledRequestError("the client went away before the answer was finished")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


WRITE_TIMEOUT_S = 60.0


class WriteLimit:
    """A context in which no single write may take longer than ``WRITE_TIMEOUT_S``. If a write takes longer,
    the context raises :class:`CancelledRequestError`.

    A stream makes thousands of writes, and nearly all end at once. So a write only notes when it began, and a
    single timer checks whether the same write is still in progress.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def began(self) -> None:
        self._began = self._loop.time()

    def ended(self) -> None:
        self._began = None

    async def __aenter__(self) -> WriteLimit:
        await self._timeout.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise CancelledRequestError(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from late
        finally:
            del self._timeout  # breaks a cycle: its task has an error whose traceback refers to self

    def _look(self) -> None:
        now = self._loop.time()
        ends = (now if self._began is None else self._began) + WRITE_TIMEOUT_S
        if ends <= now:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(ends, self._look)
