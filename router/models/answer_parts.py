"""The parts of an answer: what the model thinks, what it says, and the calls that it makes.

A model writes one text. A :class:`PartReader` finds the parts in it, as the text arrives. The writers of all
APIs then see parts and know nothing of the marks that a model puts between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, assert_never


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of what the answer says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins. Its name is complete."""

    index: int
    """Counts the calls of one answer from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments. All pieces of a call together are the JSON text of an object, or
    the beginning of this text if the answer was cut off."""

    index: int
    text: str


Part = Reasoning | Content | CallBegun | CallArguments


class PartReader(Protocol):
    """Divides one answer into parts. All pieces of a part together do not depend on how the text was cut into
    pieces. No piece is empty."""

    @property
    def watched(self) -> str | None:
        """The character that the reader waits for: until it comes, each further text is one part, of the same
        kind as the newest one, and need not be pushed. Empty: it waits for none. None: the next text must be
        pushed."""

    def push(self, text: str) -> list[Part]:
        """Take the next piece of the answer. Return what is new."""

    def finish(self) -> list[Part]:
        """End the answer. Return the rest of it."""

    def cut(self) -> list[Part]:
        """End an answer that was cut off by its length. Return the rest of it."""


class AnswerForm(Protocol):
    """What one request's answers may consist of besides content."""

    @property
    def has_special_marks(self) -> bool:
        """Whether special tokens stand between the parts. If so, the text that readers get must show them."""

    def reader(self) -> PartReader:
        """Return the reader of one answer."""


class ContentReader:
    """Reads an answer that is content and nothing else."""

    watched = ""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []

    def cut(self) -> list[Part]:
        return []


@dataclass
class Call:
    """A call whose arguments are put together."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Gathered:
    """The parts of a whole answer, put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def gathered(parts: Iterable[Part]) -> Gathered:
    whole = Gathered()
    for part in parts:
        match part:
            case Reasoning(text):
                whole.reasoning += text
            case Content(text):
                whole.content += text
            case CallBegun(_, call_id, name):
                whole.calls.append(Call(call_id, name))
            case CallArguments(index, text):
                whole.calls[index].arguments += text
            case _:
                assert_never(part)
    return whole
