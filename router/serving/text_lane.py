"""The short way of an answer's tokens from a decode server to the client."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import orjson

from router.http.connection import WritePart
from router.serving.answer import Answer, Delta


class TextLane:
    """Writes tokens as they come, with one call for each thing that must be done, and wakes no task.

    For a choice that is alone in its stream, whose events differ in their text alone, behind its first one.
    ``write_now`` is given the event and says whether it was written.
    """

    __slots__ = ("_head", "_tail", "_write_now", "is_open")

    def __init__(self, write_now: WritePart) -> None:
        self._write_now = write_now
        self._head = self._tail = b""
        self.is_open = False
        """Whether texts may be written."""

    def open(self, event: Callable[[str], bytes]) -> None:
        """The stream's beginning is written. What stands before and behind the text, a JSON string, is taken
        from an ``event``."""
        mark = secrets.token_hex(16)
        head, *tails = event(mark).split(orjson.dumps(mark))
        if len(tails) != 1:
            raise ValueError(f"a text stands {len(tails)} times in an event")
        self._head, self._tail, self.is_open = head, tails[0], True

    def write(self, answer: Answer, token_ids: tuple[int, ...]) -> Delta | None:
        """Of an open lane. What is left to be written by somebody who can wait."""
        text = answer.push_text(token_ids)
        if self._write_now(self._head + orjson.dumps(text) + self._tail):
            return None
        return Delta(text, list(token_ids))
