"""Events that differ in their text alone: a router writes one for every token."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import orjson


class EventTemplate:
    """What stands before and behind the text, a JSON string, in the events that ``write`` makes."""

    __slots__ = ("head", "tail")

    def __init__(self, write: Callable[[str], bytes]) -> None:
        mark = secrets.token_hex(16)
        head, *tails = write(mark).split(orjson.dumps(mark))
        if len(tails) != 1:
            raise ValueError(f"a text stands {len(tails)} times in an event")
        self.head, self.tail = head, tails[0]
