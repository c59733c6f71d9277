"""Finds the thinking in an answer's text, and leaves the rest to another reader."""

from __future__ import annotations

from router.models.answer_parts import Part, PartReader, Reasoning
from router.models.reasoning.thinking_text import ThinkingText


class ReasoningReader:
    """Reads an answer that may begin with thinking."""

    def __init__(self, text: ThinkingText, rest: PartReader) -> None:
        """``rest`` reads what comes behind the thinking."""
        self._text = text
        self._rest = rest

    @property
    def watched(self) -> str | None:
        return self._rest.watched if self._text.is_done else self._text.watched

    def push(self, text: str) -> list[Part]:
        return self._parts(*self._text.push(text))

    def finish(self) -> list[Part]:
        return self._parts(*self._text.finish()) + self._rest.finish()

    def cut(self) -> list[Part]:
        return self._parts(*self._text.cut()) + self._rest.cut()

    def _parts(self, thinking: str, behind: str) -> list[Part]:
        parts: list[Part] = [Reasoning(thinking)] if thinking else []
        return parts + self._rest.push(behind) if behind else parts


class WithoutReasoning:
    """Leaves out the thinking that another reader finds."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader

    @property
    def watched(self) -> str | None:
        return "" if self._reader.watched == "" else None

    def push(self, text: str) -> list[Part]:
        return _others(self._reader.push(text))

    def finish(self) -> list[Part]:
        return _others(self._reader.finish())

    def cut(self) -> list[Part]:
        return _others(self._reader.cut())


def _others(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not isinstance(part, Reasoning)]
