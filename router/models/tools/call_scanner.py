"""Finds tool calls in text that arrives piece by piece."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from router.models.answer_parts import CallArguments, CallBegun, Content, Part
from router.models.tools.tool_format import Tool, ToolCall, ToolFormat, length_of_beginning


class CallScanner:
    """Divides one answer into content and calls. Each call comes in one piece.

    White space around calls is not content. A block that can't be read, or that the model does not end, is
    content, so that no text gets lost. If an answer was cut off, marks and beginnings of marks are
    content only if their block can't be read.
    """

    watched = None

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], *, max_calls: int | None = None) -> None:
        self._form = form
        self._tools = tools
        self._max_calls = max_calls
        self._held = ""
        self._is_inside = False
        self._num_searched = 0
        """Number of characters at the start of a block's text in which no end mark begins."""
        self._opening = ""
        """The block's begin mark and the blanks before it. They are content if the block is not a call after
        all."""
        self._is_behind_call = False
        self._num_calls = 0

    def push(self, text: str) -> list[Part]:
        found: list[Part] = []
        self._held += text
        while self._take_block(found) if self._is_inside else self._take_content(found):
            pass
        return found

    def finish(self) -> list[Part]:
        found: list[Part] = []
        self._show(self._opening + self._held if self._is_inside else self._held, found)
        self._held = ""
        return found

    def cut(self) -> list[Part]:
        """Of a call that is not complete, return the part that was written."""
        if not self._is_inside:
            if num_begun := length_of_beginning(self._held, self._form.begin):
                self._held = self._held[:-num_begun].rstrip()
            return self.finish()
        found: list[Part] = []
        held = self._held
        self._held, self._is_inside = "", False
        block = held[: len(held) - length_of_beginning(held, self._form.end)]
        try:
            self._add(self._form.parse_cut(block, self._tools), found)
        except (ValueError, RecursionError):
            self._show(f"{self._opening}{held}", found)
        return found

    def _take_content(self, found: list[Part]) -> bool:
        """Take the text up to a block's begin mark. Return whether there is a block."""
        before, mark, behind = self._held.partition(self._form.begin)
        if mark:
            said = before.rstrip()
            self._show(said, found)
            self._opening = before[len(said) :] + mark
            self._held, self._is_inside, self._num_searched = behind, True, 0
            return True
        num_sure = len(self._held) - length_of_beginning(self._held, self._form.begin)
        num_sure = len(self._held[:num_sure].rstrip())  # blanks wait: a call may follow them
        self._show(self._held[:num_sure], found)
        self._held = self._held[num_sure:]
        return False

    def _take_block(self, found: list[Part]) -> bool:
        """Take a block if it is complete. Return whether it is complete."""
        end = self._form.end
        at = self._held.find(end, self._num_searched)
        if at < 0:
            self._num_searched = max(0, len(self._held) - len(end) + 1)
            return False
        block, self._held = self._held[:at], self._held[at + len(end) :]
        self._is_inside = False
        try:
            calls = self._form.parse(block, self._tools)
        except (ValueError, RecursionError):
            self._show(f"{self._opening}{block}{end}", found)
            return True
        self._add(calls, found)
        self._is_behind_call = True
        return True

    def _add(self, calls: list[ToolCall], found: list[Part]) -> None:
        if self._max_calls is not None:
            calls = calls[: self._max_calls - self._num_calls]
        for index, call in enumerate(calls, self._num_calls):
            found.append(CallBegun(index, f"call_{secrets.token_hex(12)}", call.name))
            if call.arguments:
                found.append(CallArguments(index, call.arguments))
        self._num_calls += len(calls)

    def _show(self, text: str, found: list[Part]) -> None:
        if self._is_behind_call:
            text = text.lstrip()
        if text:
            found.append(Content(text))
            self._is_behind_call = False
