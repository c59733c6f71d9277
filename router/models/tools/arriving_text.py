"""Text of an answer that arrives piece by piece, as the formats of tool calls read it."""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads a part of the text. It yields whenever it needs text that has not arrived yet, so what it reads does
not depend on how the text was cut into pieces."""

_NO_BLANK = re.compile(r"\S")
_NO_WORD = re.compile(r"[^\w.+-]")


class UnreadableError(Exception):
    """The text is no call from here on."""


class ArrivingText:
    """Remembers what was taken since the last :meth:`settle`, so that text which turns out to be no call does
    not get lost. Any number of pieces costs time in proportion to their length."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._taken: list[str] = []

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def settle(self) -> None:
        """Forget what was taken: its meaning has been told."""
        self._taken.clear()

    @property
    def rest(self) -> str:
        """The text that was not taken."""
        return self._text[self._at :]

    @property
    def taken(self) -> str:
        """The text that was taken since the last :meth:`settle`."""
        return "".join(self._taken)

    def take_all(self) -> str:
        return self._take_to(len(self._text))

    def take(self, length: int) -> str:
        return self._take_to(self._at + length)

    def upto(self, marks: tuple[str, ...], window: int | None = None) -> tuple[str, bool]:
        """Take the text before the first of ``marks``, as far as it is certain that no mark begins in it.
        Return it, and whether a mark follows. Look at no more than the next ``window`` characters."""
        end = len(self._text) if window is None else min(len(self._text), self._at + window)
        if match := _any_of(marks).search(self._text, self._at, end):
            return self._take_to(match.start()), True
        tail = self._text[max(self._at, end - max(map(len, marks)) + 1) : end]
        num_begun = max(length_of_beginning(tail, mark) for mark in marks)
        return self._take_to(end - num_begun), False

    def before(self, marks: tuple[str, ...], most: int | None = None) -> Reading[str]:
        """Take the text before the first of ``marks``. Raises :class:`UnreadableError` behind ``most``
        characters."""
        pieces, length, is_followed, window = list[str](), 0, False, None
        while not is_followed:
            if most is not None:
                window = most - length + max(map(len, marks))  # no more, since this may be tried at each mark
            piece, is_followed = self.upto(marks, window)
            pieces.append(piece)
            length += len(piece)
            if most is not None and length > most:
                self._put_back(length - most)  # so that it ends here however the text was cut into pieces
                raise UnreadableError
            if not is_followed:
                yield
        return "".join(pieces)

    def accept(self, *marks: str) -> Reading[str]:
        """Take the mark with which the text goes on, and return it. Empty if it goes on otherwise. No mark
        may begin with another one."""
        while True:
            is_open = False
            for mark in marks:
                if self._text.startswith(mark, self._at):
                    return self._take_to(self._at + len(mark))
                is_open |= len(self._text) - self._at < len(mark) and mark.startswith(self.rest)
            if not is_open:
                return ""
            yield

    def require(self, *marks: str) -> Reading[str]:
        """Take the mark with which the text goes on. Raises :class:`UnreadableError`."""
        mark = yield from self.accept(*marks)
        if not mark:
            raise UnreadableError
        return mark

    def peek(self) -> Reading[str]:
        """Return the next character, which is not taken."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def skip_blanks(self) -> Reading[None]:
        is_over = False
        while not is_over:
            match = _NO_BLANK.search(self._text, self._at)
            is_over = match is not None
            self._take_to(len(self._text) if match is None else match.start())
            if not is_over:
                yield

    def word(self, most: int) -> Reading[str]:
        """Take letters, digits and ``_.+-``, at most ``most`` of them."""
        length = 0
        while True:
            match = _NO_WORD.search(self._text, self._at + length)
            length = len(self._text) - self._at if match is None else match.start() - self._at
            if length > most:
                raise UnreadableError
            if match is not None:
                return self.take(length)
            yield

    def _put_back(self, length: int) -> None:
        self._at -= length
        self._taken[-1] = self._taken[-1][:-length]

    def _take_to(self, end: int) -> str:
        taken, self._at = self._text[self._at : end], end
        if taken:
            self._taken.append(taken)
        return taken


def length_of_beginning(text: str, mark: str) -> int:
    """Return the length of the longest beginning of ``mark`` with which ``text`` ends. The whole mark does
    not count as a beginning."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


@lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the first of ``marks``. Of two that begin at the same place, the longer one."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
