"""The requests of one engine whose answers must follow a grammar.

A mask says which tokens may come next in an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from engine.grammar.follower import Asker, Follower
from engine.grammar.source import GrammarSource
from engine.request import Request
from wire.errors import TwinfangError, error_from_code
from wire.messages.generation import ErrorReply
from wire.messages.ranks import GrammarNews


class Rows(Protocol):
    """The rows of requests, as the engine's steps keep them."""

    def allow(self, request: Request) -> None:
        """Takes the masks that have arrived for a running request."""


class Following:
    """Asks for masks, and passes on masks that have arrived, between two steps.

    The engine's thread calls it.
    """

    def __init__(self, grammars: GrammarSource, rows: Rows) -> None:
        self._grammars = grammars
        self._rows = rows
        self._requests: dict[str, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def open(self, request: Request) -> None:
        """Gives a request and its forks followers of their grammar, and waits for the first masks.

        Raises :class:`wire.errors.GrammarError` if the grammar can't be followed.
        """
        params = request.params
        if params is not None and params.grammar is not None and request.follower is None:
            answer = request.tokens[request.num_prompt :]
            follower = self._grammars.follow(
                params.grammar, answer, params.thinking, Asker(request.client, request.cache_salt)
            )
            request.follower = follower
            follower.opened.result()
        for fork in request.forks:
            self.open(fork)

    def add(self, request: Request) -> None:
        """Follows a request and its forks from now on: they were queued."""
        if isinstance(request.follower, Follower):
            self._requests[request.request_id] = request
            self._grammars.add(request.follower, request.request_id)
        for fork in request.forks:
            self.add(fork)

    def drop(self, request: Request) -> None:
        """Stops following a request and its forks: they have ended, or were refused."""
        if isinstance(request.follower, Follower):
            self._requests.pop(request.request_id, None)
            self._grammars.drop(request.follower)
        for fork in request.forks:
            self.drop(fork)

    def news(self) -> tuple[GrammarNews, ...]:
        """Returns the masks and errors that have come since the last step.

        Waits a moment for masks that running rows need.
        """
        running = (one.follower for one in self._requests.values() if one.row >= 0)
        awaited = [follower for follower in running if isinstance(follower, Follower)]
        return tuple(
            GrammarNews(
                one.request_id,
                one.masks,
                None if one.error is None else ErrorReply(one.error.code, one.error.message),
            )
            for one in self._grammars.news(awaited)
        )

    def take(self, news: Iterable[GrammarNews], fail: Callable[[Request, TwinfangError], None]) -> None:
        """Gives rows the masks that have come. For each request whose grammar failed, calls ``fail`` with the
        request and the error."""
        for one in news:
            request = self._requests.get(one.request_id)
            if request is None or request.follower is None:  # the request has ended meanwhile
                continue
            if one.error is not None:
                fail(request, error_from_code(one.error.code, one.error.message))
                continue
            request.follower.masks = np.frombuffer(one.masks, dtype=np.int32)
            if request.row >= 0:
                self._rows.allow(request)

    def ask(self, request: Request, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Asks for the masks after the tokens that an answer has gained, and after each of its next drafts.

        Does nothing if the answer has ended, or follows no grammar.
        """
        if isinstance(request.follower, Follower) and request.finish_reason is None:
            self._grammars.ask(request.follower, token_ids, drafts)
