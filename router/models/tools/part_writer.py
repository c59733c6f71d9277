"""Writes down the content and the calls that are found in an answer."""

from __future__ import annotations

import re
import secrets

from router.models.answer_parts import CallArguments, CallBegun, Content, Part
from router.models.tools.arriving_text import ArrivingText, UnreadableError

MAX_CALLS = 512
"""As many calls as one message of a request may have."""
MAX_NAME_CHARS = 1024
BARE_NAME = re.compile(r"[^\s<>{}\[\]]+")
"""A name that stands without quotes or tags around it."""


class PartWriter:
    """White space around calls is not content. Whatever is written settles the text that was taken so far."""

    def __init__(self, text: ArrivingText, names: frozenset[str] | None, max_calls: int | None) -> None:
        """``names``: the functions that may be called; None: any. Calls beyond ``max_calls`` are left out."""
        self._text = text
        self._names = names
        self._max_calls = max_calls
        self._new: list[Part] = []
        self._blanks: list[str] = []
        """White space at the end of the content. It waits, since a call may follow."""
        self._content: list[str] = []
        """New pieces of the content."""
        self._asides: list[str] = []
        self._arguments: list[str] = []
        """New pieces of the last call's arguments."""
        self._ids: set[str] = set()
        self._is_behind_call = False
        self.num_calls = 0
        """Number of calls, with those that were left out."""

    def new(self) -> list[Part]:
        """Return the parts since the last time."""
        self._write()
        new, self._new = self._new, []
        return new

    def content(self, text: str) -> None:
        self._text.settle()
        if self._is_behind_call:
            text = text.lstrip()
        if said := text.rstrip():
            self._content += [*self._blanks, said]
            self._blanks.clear()
            self._is_behind_call = False
        if blanks := text[len(said) :]:
            self._blanks.append(blanks)

    def exact(self, text: str) -> None:
        """Write content that is white space alone."""
        if not self._is_behind_call:
            self._content.append(text)

    def blanks(self) -> str:
        """Return the white space that waits, and forget it."""
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks

    def begin(self, name: str, call_id: str = "") -> None:
        """Begin a call. Raises :class:`UnreadableError` for a name that no function can have, and behind
        ``MAX_CALLS`` calls. An id that an earlier call has is replaced."""
        is_name = name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS
        if (
            not is_name
            or self.num_calls == MAX_CALLS
            or (self._names is not None and name not in self._names)
        ):
            raise UnreadableError
        if not call_id or call_id in self._ids:
            call_id = f"call_{secrets.token_hex(12)}"
        self.end()
        self._write()
        self.num_calls += 1
        self._ids.add(call_id)
        self._is_behind_call = True
        if self._is_told:
            self._new.append(CallBegun(self.num_calls - 1, call_id, name))
        self._text.settle()

    def add(self, arguments: str) -> None:
        """Add the next piece of the call's arguments."""
        if self._is_told and arguments:
            self._arguments.append(arguments)
        self._text.settle()

    def aside(self, text: str) -> None:
        """Keep text that stands within a call and is no part of it. It becomes content behind the call."""
        if text.strip():
            self._asides.append(text)
        self._text.settle()

    def end(self) -> None:
        """End the call, if there is one."""
        if self._arguments:
            self._write()
        for text in self._asides:
            self.content(text)
        self._asides.clear()

    def _write(self) -> None:
        """Make parts of the pieces. Arguments come first: content is only added behind the end of a call."""
        if self._arguments:
            self._new.append(CallArguments(self.num_calls - 1, "".join(self._arguments)))
            self._arguments.clear()
        if self._content:
            self._new.append(Content("".join(self._content)))
            self._content.clear()

    @property
    def _is_told(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls
