"""Finds tool calls in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from router.models.answer_parts import Part
from router.models.tools.arriving_text import ArrivingText, Reading, UnreadableError
from router.models.tools.part_writer import PartWriter
from router.models.tools.tool_format import Tool, ToolFormat


class CallScanner:
    """Divides one answer into content and calls.

    White space around calls is not content. Text in which a format can't read a call is content, so that no
    text gets lost. A call that has begun stays a call: its arguments then end where they can't be read
    further. If an answer was cut off, what may have become a call is left out."""

    watched = None

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], *, max_calls: int | None = None) -> None:
        self._form = form
        self._tools = tools
        self._text = ArrivingText()
        # Without a mark, only its name tells a call from other text.
        names = None if form.begins else frozenset(tool.name for tool in tools)
        self._parts = PartWriter(self._text, names, max_calls)
        self._opening = ""
        """The block's begin mark and the blanks before it. They are content if the block is not a call after
        all."""
        self._is_inside = False
        self._num_calls_before = 0
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        self._text.add(text)
        next(self._reading)
        return self._parts.new()

    def finish(self) -> list[Part]:
        """End the answer. Return the rest of it."""
        if self._is_inside:
            self._leave_block()
        self._parts.content(self._text.take_all())
        return self._last()

    def cut(self) -> list[Part]:
        """End an answer that was cut off. Return what is certain of the rest."""
        if self._is_inside:
            self._parts.end()
        elif self._text.rest:  # a mark has begun, and the blanks before it belong to it
            self._parts.blanks()
        return self._last()

    def _last(self) -> list[Part]:
        if blanks := self._parts.blanks():
            self._parts.exact(blanks)
        return self._parts.new()

    def _read(self) -> Reading[None]:
        if not self._form.begins:
            yield from self._read_block()
        while True:
            yield from self._read_content()
            yield from self._read_block()

    def _read_content(self) -> Reading[None]:
        """Read the text up to a begin mark."""
        if not self._form.begins:
            while True:
                self._parts.content(self._text.take_all())
                yield
        is_followed = False
        while not is_followed:
            said, is_followed = self._text.upto(self._form.begins)
            self._parts.content(said)
            if not is_followed:
                yield
        mark = yield from self._text.require(*self._form.begins)
        self._opening = self._parts.blanks() + mark
        self._text.settle()

    def _read_block(self) -> Reading[None]:
        self._is_inside, self._num_calls_before = True, self._parts.num_calls
        try:
            yield from self._form.read(self._text, self._parts, self._tools)
            if self._has_called:
                self._text.settle()
        except UnreadableError:
            pass  # what can't be read is content
        self._leave_block()

    def _leave_block(self) -> None:
        """Show the text that was read and is no call."""
        said = self._text.taken if self._has_called else self._opening + self._text.taken
        self._parts.end()
        self._parts.content(said)
        self._opening, self._is_inside = "", False

    @property
    def _has_called(self) -> bool:
        """Whether there was a call in the block."""
        return self._parts.num_calls > self._num_calls_before
