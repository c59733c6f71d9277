"""Routers' streams: their requests, each served by a task of its own, and what is said of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from wire.codec import encode
from wire.errors import DeadlineError, InvalidRequestError, TwinfangError
from wire.gathered import Outgoing, messages_in
from wire.messages.generation import (
    Cancel,
    DrainNews,
    ErrorReply,
    PrefillNews,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
)
from wire.rpc import PREFILL_PATH, decode_prefill_request, error_reply, requested_id, tell_of_unreadable

Serve = Callable[[PrefillRequest], AsyncGenerator[PrefillStarted | PrefillReply, None]]


class RouterStreams:
    """The streams of all routers.

    ``serve`` yields what is said of one request. If it raises, the router gets the error. If the router
    cancels the request, the generator is closed at once.
    """

    def __init__(self, serve: Serve, drain_news: Callable[[], DrainNews]) -> None:
        self._serve = serve
        self._drain_news = drain_news
        self._open: set[_Stream] = set()

    async def handle(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Serves one router until it goes away. Then all its requests that are still computed are
        cancelled."""
        stream = _Stream(self._serve)
        stream.outgoing.put(encode(self._drain_news()))  # it may have changed since the router's last call
        self._open.add(stream)
        reader = asyncio.create_task(stream.read(requests, context))
        try:
            while (data := await stream.outgoing.next()) is not None:
                yield data
        finally:
            reader.cancel()
            self._open.discard(stream)
            stream.cancel_all()

    def tell_of_drain(self) -> None:
        """Tells every router whether the server drains."""
        for stream in self._open:
            stream.outgoing.put(encode(self._drain_news()))

    def close(self) -> None:
        """Ends every stream once everything that waits is sent."""
        for stream in self._open:
            stream.outgoing.close()


class _Stream:
    def __init__(self, serve: Serve) -> None:
        self.outgoing = Outgoing()
        self._serve = serve
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def read(self, requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            async for data in requests:
                try:
                    messages = messages_in(data)
                except TwinfangError as error:
                    tell_of_unreadable("Stream", context, error)
                    continue
                for one in messages:
                    self._take(one, context)
        finally:
            self.outgoing.close()

    def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _take(self, data: bytes, context: Any) -> None:
        try:
            message = decode_prefill_request(data)
        except TwinfangError as error:
            tell_of_unreadable("Stream", context, error)
            request_id = requested_id(data, PrefillRequest)
            if request_id is not None:  # or its sender would wait in vain
                self._tell(request_id, ErrorReply(error.code, error.message))
            return
        if isinstance(message, Cancel):
            if (task := self._tasks.get(message.request_id)) is not None:
                task.cancel()
        elif message.request_id in self._tasks:
            in_use = InvalidRequestError(f"request id {message.request_id!r} is in use; choose another")
            self._tell(message.request_id, ErrorReply(in_use.code, in_use.message))
        else:
            self._tasks[message.request_id] = asyncio.create_task(self._run(message))

    async def _run(self, request: PrefillRequest) -> None:
        try:
            async with asyncio.timeout(request.timeout_s), aclosing(self._serve(request)) as replies:
                async for reply in replies:
                    self._tell(request.request_id, reply)
        except TimeoutError:
            late = DeadlineError.told(f"the prompt was not computed within {request.timeout_s:g} s")
            self._tell(request.request_id, ErrorReply(late.code, late.message))
        except Exception as error:
            self._tell(request.request_id, error_reply(error, PREFILL_PATH))
        finally:
            del self._tasks[request.request_id]

    def _tell(self, request_id: str, news: PrefillStarted | PrefillReply | ErrorReply) -> None:
        self.outgoing.put(encode(PrefillNews(request_id, news)))
