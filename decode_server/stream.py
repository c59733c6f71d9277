"""One router's stream: its requests, and the outputs that wait to be sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

from wire.codec import encode
from wire.messages.generation import DrainNews, RequestOutput, StepNews, StepOutputs
from wire.outbox import Outbox


class RouterStream:
    """Outputs of all requests of one router. Used only on the event loop.

    While the network is busy, the outputs of several steps are collected. Then they are sent as one message,
    or as several messages if there are many outputs.
    """

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}
        """The handle of each request whose last output is not sent yet."""
        self._outbox = Outbox()
        self._drain_news: DrainNews | None = None
        self._news = asyncio.Event()
        self._closed = False

    @property
    def request_ids(self) -> list[str]:
        """The requests whose last output is not sent yet."""
        return list(self._handles)

    def begin(self, request_id: str, handle: int) -> None:
        """Takes a request. The router knows it as ``handle``."""
        self._handles[request_id] = handle

    def drop(self, request_id: str) -> None:
        """Forgets a request that was cancelled. Of its outputs that wait, those that are only tokens are not
        sent any more."""
        self._handles.pop(request_id, None)

    def deliver_tokens(self, token_ids: Mapping[str, tuple[int, ...]]) -> None:
        """Queues outputs that contain only tokens, by request id."""
        self._outbox.add_all_tokens(token_ids)
        self._news.set()

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        self._outbox.add_all(outputs)
        self._news.set()

    def tell(self, news: DrainNews) -> None:
        """Queues a drain message before all unsent outputs. It replaces an earlier one that is not sent
        yet."""
        self._drain_news = news
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields encoded :class:`StepNews` and :class:`DrainNews` until the stream is closed."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._drain_news is not None:
                news, self._drain_news = self._drain_news, None
                yield encode(news)
            while self._outbox:
                yield encode(self._news_of(self._outbox.take_message()))
            if self._closed and not self._outbox:
                return

    def _news_of(self, outputs: StepOutputs) -> StepNews:
        news = outputs.news(self._handles)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._handles.pop(output.request_id, None)
        return news
