"""The short path of an answer's tokens from a decode server to the client."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import orjson

from router.http.connection import WritePart
from router.serving.answer import Answer, Delta


class TextLane:
    """Writes tokens as they come, with as few calls as possible and without waking a task.

    It is for a stream with a single choice whose events, after the first one, differ only in their text.
    ``write_now`` gets an event and returns whether the event was written.
    """

    __slots__ = ("_head", "_tail", "_write_now", "is_open")

    def __init__(self, write_now: WritePart) -> None:
        self._write_now = write_now
        self._head = self._tail = b""
        self.is_open = False
        """Whether texts may be written."""

    def open(self, event: Callable[[str], bytes]) -> None:
        """Open the lane, once the stream's beginning is written. ``event`` returns the event for a text. The
        lane calls it once with a sample text, and keeps the bytes that come before and after this text in the
        event."""
        mark = secrets.token_hex(16)
        head, *tails = event(mark).split(orjson.dumps(mark))
        if len(tails) != 1:
            raise ValueError(f"a text stands {len(tails)} times in an event, instead of once")
        self._head, self._tail, self.is_open = head, tails[0], True

    def write(self, answer: Answer, token_ids: tuple[int, ...]) -> Delta | None:
        """Write the text of tokens; the lane must be open. Return None, or the text and the tokens as a delta
        if the text can't be written without waiting."""
        text = answer.push_text(token_ids)
        if self._write_now(self._head + orjson.dumps(text) + self._tail):
            return None
        return Delta(text, list(token_ids))
