"""The short path of an answer's tokens from a decode server to the client.

It is for a stream with a single choice whose next events differ only in their text. Tokens take as few calls
as possible here, and wake no task: with hundreds of streams, each token finds its objects out of the cache.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

import orjson

from router.http.event_stream import WriteNow
from router.observe.token_metrics import TokenMetrics
from router.serving.answer import Answer, Delta
from router.serving.inbox import Inbox
from wire.messages.generation import RequestOutput


class LongWay(Protocol):
    """Takes the tokens that the lane can't write."""

    def take_tokens(self, token_ids: tuple[int, ...], now_s: float) -> None:
        """Take tokens as they came."""

    def take_left(self, left: Delta | Exception, token_ids: tuple[int, ...]) -> None:
        """Take tokens that are turned into text already, or the error in doing so."""


class TextLane:
    """Writes the texts of one choice's tokens, unless a text contains ``watched``, the character with which
    marks begin."""

    __slots__ = (
        "_answer",
        "_answer_ids",
        "_detokenizer",
        "_inbox",
        "_last_token_s",
        "_long_way",
        "_metrics",
        "_own_json",
        "_pieces",
        "_write_now",
        "watched",
    )

    def __init__(
        self,
        answer: Answer,
        own_json: Callable[[int], bytes | None],
        *,
        answer_ids: list[int],
        last_token_s: list[float],
        inbox: Inbox[tuple[int, RequestOutput | Delta | Exception]],
        metrics: TokenMetrics,
        long_way: LongWay,
        write_now: WriteNow,
        event: Callable[[str], bytes],
        watched: str,
    ) -> None:
        """``own_json`` returns the JSON of a token's own text (:attr:`Tokenizer.own_json`), ``event`` the
        event for a text. ``answer_ids`` and ``last_token_s`` are the lists in which the request keeps the
        choice's tokens and the time of its last token. Tokens take the lane only while ``inbox`` is awaited
        and empty, so that they can't overtake others."""
        self._answer = answer
        self._detokenizer = answer.detokenizer
        self._own_json = own_json
        self._answer_ids = answer_ids
        self._last_token_s = last_token_s
        self._inbox = inbox
        self._metrics = metrics
        self._long_way = long_way
        self._write_now = write_now
        self._pieces = _pieces(event)
        self.watched = watched

    def take_tokens(self, token_ids: tuple[int, ...], now_s: float) -> None:
        """Take tokens that came at ``now_s``, on the monotonic clock."""
        self._answer_ids += token_ids
        if not self._inbox.is_awaited:
            self._long_way.take_tokens(token_ids, now_s)
            return
        last = self._last_token_s
        self._metrics.later(len(token_ids), now_s, last[0])
        last[0] = now_s
        if len(token_ids) == 1 and self._detokenizer.is_clean and not self.watched:
            token_id = token_ids[0]
            data = self._own_json(token_id)
            if data is not None and self._write_now(data.join(self._pieces)):
                self._detokenizer.pass_over(token_id)
                self._answer.num_tokens += 1
                return
        try:
            text = self._answer.push_text(token_ids)
            if not (self.watched and self.watched in text) and self._write_now(
                orjson.dumps(text).join(self._pieces)
            ):
                return
        except Exception as error:
            self._long_way.take_left(error, token_ids)
            return
        self._long_way.take_left(Delta(text, list(token_ids)), token_ids)


def _pieces(event: Callable[[str], bytes]) -> list[bytes]:
    """Return the bytes before, between and behind the places of an event where its text stands. They are
    found with a sample text."""
    sample = secrets.token_hex(16)
    pieces = event(sample).split(orjson.dumps(sample))
    if len(pieces) == 1:
        raise ValueError("an event does not contain its text")
    return pieces
