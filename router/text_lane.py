"""The short way of an answer's tokens from a decode server to the client."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import orjson

from router.answer import Answer, Delta
from router.http_connection import WritePart


class EventTemplate:
    """What stands before and behind the text, a JSON string, in the events that ``write`` makes."""

    __slots__ = ("head", "tail")

    def __init__(self, write: Callable[[str], bytes]) -> None:
        mark = secrets.token_hex(16)
        head, *tails = write(mark).split(orjson.dumps(mark))
        if len(tails) != 1:
            raise ValueError(f"a text stands {len(tails)} times in an event")
        self.head, self.tail = head, tails[0]


class TextLane:
    """Writes tokens as they come, with one call for each thing that must be done, and wakes no task.

    For a choice that is alone in its stream, whose events differ in their text alone, behind its first one.
    ``measure`` is told how many tokens there are; ``write_now`` is given the event and says whether it was
    written.
    """

    __slots__ = ("_answer", "_measure", "_template", "_write_now")

    def __init__(
        self,
        answer: Answer,
        template: EventTemplate,
        *,
        measure: Callable[[int], None],
        write_now: WritePart,
    ) -> None:
        self._answer = answer
        self._template = template
        self._measure = measure
        self._write_now = write_now

    def write(self, token_ids: tuple[int, ...]) -> Delta | None:
        """What is left to be written by somebody who can wait."""
        text = self._answer.push_text(token_ids)
        self._measure(len(token_ids))
        template = self._template
        if self._write_now(template.head + orjson.dumps(text) + template.tail):
            return None
        return Delta(text, list(token_ids))
