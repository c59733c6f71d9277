"""Divides an answer's text into the thinking and what comes behind it."""

from __future__ import annotations

from collections.abc import Sequence

from router.models.reasoning.reasoning_format import Place, ReasoningFormat
from router.models.tools.arriving_text import length_of_beginning

MAX_BLANKS = 64
"""White space that may precede the begin mark. If there is more, the answer has no thinking."""


class ThinkingText:
    """Divides one answer. The result does not depend on how the text was cut into pieces.

    Thinking may only begin where the answer begins. Line breaks behind a mark are not part of what follows
    the mark. Text is held back only while it may be a mark.
    """

    def __init__(self, form: ReasoningFormat, place: Place, interrupts: Sequence[str] = ()) -> None:
        """``place`` is that of the answer's first character. ``interrupts`` end the thinking and belong to
        the text behind it."""
        self._form = form
        self._marks = (*form.ends, *interrupts)
        self._interrupts = interrupts
        self.is_open = place is Place.WITHIN
        """Whether the prompt has the begin mark. Some models then write it again."""
        self.place = Place.BEHIND if place is Place.BEHIND else Place.BEFORE
        self.held = ""
        self._is_behind_mark = False
        self.num_chars = 0
        """Number of characters that were pushed."""
        self.end_at = 0
        """How many of them stand before the end mark, once it was found."""

    @property
    def watched(self) -> str | None:
        """The character that all marks begin with. Thinking that does not contain it is complete: it needs
        not be pushed. None: it must be pushed."""
        if self.place is not Place.WITHIN or self.held or self._is_behind_mark:
            return None
        return self._form.end[0]

    @property
    def is_done(self) -> bool:
        """Whether further text is all behind the thinking, and unchanged."""
        return self.place is Place.BEHIND and not self._is_behind_mark

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece of the answer. Return the new thinking, and the new text behind it."""
        self.num_chars += len(text)
        if self.place is Place.BEFORE:
            self.held += text
            if not self._is_begun():
                return "", ""
            text, self.held = self.held, ""
        if self.place is Place.BEHIND:
            return "", self._without_breaks(text)
        return self._within(text)

    def finish(self) -> tuple[str, str]:
        """End the answer. Return the rest of it."""
        held, self.held = self.held, ""
        if self.place is Place.BEFORE:
            self._leave_begin()
        return ("", held) if self.place is Place.BEHIND else (self._without_breaks(held), "")

    def cut(self) -> tuple[str, str]:
        """End an answer that was cut off. Return the rest of it, without a mark that has only begun."""
        if self.held.strip():
            self.held = ""
        return self.finish()

    def _is_begun(self) -> bool:
        """Take the begin mark from the start of the held text. Return whether it is certain now if there is
        one."""
        said = self.held.lstrip()
        if len(self.held) - len(said) <= MAX_BLANKS:
            for mark in self._form.begins:
                if said.startswith(mark):
                    self.held = said[len(mark) :]
                    self.place, self._is_behind_mark = Place.WITHIN, True
                    return True
            if any(mark.startswith(said) for mark in self._form.begins):
                return False
        self._leave_begin()
        return True

    def _leave_begin(self) -> None:
        self.place = Place.WITHIN if self.is_open else Place.BEHIND
        self._is_behind_mark = self.is_open

    def _within(self, text: str) -> tuple[str, str]:
        text, self.held = self.held + text, ""
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if not found:
            num_begun = max(length_of_beginning(text, mark) for mark in self._marks)
            num_sure = len(text) - num_begun
            self.held = text[num_sure:]
            return self._without_breaks(text[:num_sure]), ""
        at, mark = min(found)
        self.end_at = self.num_chars - len(text) + at
        thinking, self.place = self._without_breaks(text[:at]), Place.BEHIND
        if mark in self._interrupts:
            self._is_behind_mark = False
            return thinking, text[at:]
        self._is_behind_mark = True
        return thinking, self._without_breaks(text[at + len(mark) :])

    def _without_breaks(self, text: str) -> str:
        """Return ``text`` without line breaks that stand behind a mark."""
        if not self._is_behind_mark:
            return text
        text = text.lstrip("\n")
        self._is_behind_mark = not text
        return text
