"""The short path of an answer's tokens from a decode server to the client."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

import orjson

from router.http.event_stream import WriteNow
from router.serving.answer import Answer, Delta


class Lane(Protocol):
    """Writes tokens as they come, with as few calls as possible and without waking a task.

    It is for a stream with a single choice whose next events differ only in their text.
    """

    def write(self, answer: Answer, token_ids: tuple[int, ...]) -> Delta | None:
        """Write the text of tokens. Return None, or the text and the tokens as a delta if the lane can't
        write them."""


class TextLane:
    """Writes every text."""

    __slots__ = ("_pieces", "_write_now")

    def __init__(self, write_now: WriteNow, event: Callable[[str], bytes]) -> None:
        """``write_now`` gets an event and returns whether the event was written, which it is if the client
        need not be waited for. ``event`` returns the event for a text."""
        self._write_now = write_now
        self._pieces = _pieces(event)

    def write(self, answer: Answer, token_ids: tuple[int, ...]) -> Delta | None:
        text = answer.push_text(token_ids)
        if self._write_now(orjson.dumps(text).join(self._pieces)):
            return None
        return Delta(text, list(token_ids))


class WatchedLane:
    """Writes texts that do not contain a certain character, with which marks begin."""

    __slots__ = ("_pieces", "_watched", "_write_now")

    def __init__(self, write_now: WriteNow, event: Callable[[str], bytes], watched: str) -> None:
        self._write_now = write_now
        self._pieces = _pieces(event)
        self._watched = watched

    def write(self, answer: Answer, token_ids: tuple[int, ...]) -> Delta | None:
        text = answer.push_text(token_ids)
        if self._watched not in text and self._write_now(orjson.dumps(text).join(self._pieces)):
            return None
        return Delta(text, list(token_ids))


def next_lane(
    lane: Lane | None, watched: str | None, write_now: WriteNow, event: Callable[[str], bytes]
) -> Lane | None:
    """Return the lane for the texts that come next, after those that ``lane`` has left to its caller. They
    may belong to another part of the answer. None: the next text must not take a lane. ``watched`` is
    :attr:`PartReader.watched`."""
    if watched is None:
        return None
    if watched:
        return WatchedLane(write_now, event, watched)
    return lane if isinstance(lane, TextLane) else TextLane(write_now, event)


def _pieces(event: Callable[[str], bytes]) -> list[bytes]:
    """Return the bytes before, between and behind the places of an event where its text stands. They are
    found with a sample text."""
    sample = secrets.token_hex(16)
    pieces = event(sample).split(orjson.dumps(sample))
    if len(pieces) == 1:
        raise ValueError("an event does not contain its text")
    return pieces
