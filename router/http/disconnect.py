"""Ends the work for a client that has gone away, or that reads nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from router.http.client_end import client_end_of
from wire.errors import CancelledRequestError

WRITE_TIMEOUT_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")


class WhileConnected:
    """A context that lasts only as long as the client stays. If the client goes away, or if a single write
    takes longer than ``WRITE_TIMEOUT_S``, the context cancels its task and raises
    :class:`CancelledRequestError`.

    A stream makes thousands of writes, and nearly all end at once, because the client is not slow. So only
    writes to a slow client are timed. They note when they began, and a single timer checks whether the same
    write is still in progress.
    """

    def __init__(self, scope: Scope) -> None:
        self._client_end = client_end_of(scope)
        self._loop = asyncio.get_running_loop()
        self._write_began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reason = ""

    def write_began(self) -> None:
        """Note that a part is about to be passed to the connection, which may wait for the client."""
        if not self._client_end.is_slow:
            return
        self._write_began = now = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(now + WRITE_TIMEOUT_S, self._look)

    def write_ended(self) -> None:
        self._write_began = None

    def __enter__(self) -> WhileConnected:
        if self._client_end.is_gone:
            raise CancelledRequestError(GONE)
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._client_end.when_gone(self._gone)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client_end.when_gone(None)
        if self._timer is not None:
            self._timer.cancel()
        if self._reason and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise CancelledRequestError(self._reason) from None

    def _gone(self) -> None:
        self._end(GONE)

    def _look(self) -> None:
        now = self._loop.time()
        ends = (now if self._write_began is None else self._write_began) + WRITE_TIMEOUT_S
        if ends <= now:
            self._end(f"the client took nothing for {WRITE_TIMEOUT_S:g} s")
        else:
            self._timer = self._loop.call_at(ends, self._look)

    def _end(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            self._task.cancel()


def while_connected(
    check: Callable[Concatenate[Request, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Request, P], Coroutine[Any, Any, T]]:
    """Make a function of a request end when the request's client goes away: it raises
    :class:`CancelledRequestError` then."""

    @wraps(check)
    async def checked(http: Request, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with WhileConnected(http.scope):
            return await check(http, *args, **kwargs)

    return checked


GONE = "the client went away before the answer was finished"
