"""The items of an answer, and the events that tell how they grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, assert_never

from router.api.openai.logprobs import JsonList
from router.models.answer_parts import CallArguments, CallBegun, Content, Part, Reasoning

Event = dict[str, Any]
Status = str
"""``in_progress``, ``completed`` or ``incomplete``."""


class OpenItem(Protocol):
    """An item that grows. Its events lack the fields that :class:`Output` adds to the events of all items."""

    id: str

    def item(self, status: Status) -> dict[str, Any]:
        """Return the item as it is now."""

    def begin(self) -> list[Event]:
        """Return the events behind the one that adds the item."""

    def grow(self, text: str) -> Event:
        """Take the next piece of text. Return its event."""

    def end(self) -> list[Event]:
        """Return the events before the one that ends the item."""


class Message:
    """What the model says to the user."""

    def __init__(self, number: str) -> None:
        self.id = f"msg_{number}"
        self._texts: list[str] = []
        self._logprobs = JsonList()

    def add_logprobs(self, logprobs: Sequence[dict[str, Any]]) -> None:
        self._logprobs.add(logprobs)

    def item(self, status: Status) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def begin(self) -> list[Event]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def grow(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": []}

    def end(self) -> list[Event]:
        part = self._part()
        done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        return [
            {"type": "response.output_text.done", **done},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs.json}


class Thinking:
    """What the model thinks."""

    def __init__(self, number: str) -> None:
        self.id = f"rs_{number}"
        self._texts: list[str] = []

    def item(self, status: Status) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def begin(self) -> list[Event]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def grow(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def end(self) -> list[Event]:
        part = self._part()
        return [
            {"type": "response.reasoning_text.done", "content_index": 0, "text": part["text"]},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class Call:
    """A call of a function."""

    def __init__(self, number: str, begun: CallBegun) -> None:
        self.id = f"fc_{number}"
        self._begun = begun
        self._texts: list[str] = []

    def item(self, status: Status) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._begun.id,
            "name": self._begun.name,
            "arguments": "".join(self._texts),
        }

    def begin(self) -> list[Event]:
        return []

    def grow(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def end(self) -> list[Event]:
        fields = {"name": self._begun.name, "arguments": "".join(self._texts)}
        return [{"type": "response.function_call_arguments.done", **fields}]


class Output:
    """Puts the parts of one answer together to items. An item ends where a part of another item begins."""

    def __init__(self, number: str) -> None:
        """``number`` makes the ids of this answer's items unlike those of all others."""
        self._number = number
        self._open: OpenItem | None = None
        self.items: list[dict[str, Any]] = []
        """The items that have ended."""

    def add(self, parts: Iterable[Part], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take the next parts; return their events. Only an answer of content alone may have
        ``logprobs``, those of the tokens that the parts were made from."""
        events: list[Event] = []
        for part in parts:
            match part:
                case Content(text):
                    message = self._open
                    if not isinstance(message, Message):
                        message = Message(self._next_number())
                        events += self._begin(message)
                    events.append(self._grown(message, text))
                case Reasoning(text):
                    if not isinstance(self._open, Thinking):
                        events += self._begin(Thinking(self._next_number()))
                    events.append(self._grown(self._open, text))
                case CallBegun():
                    events += self._begin(Call(self._next_number(), part))
                case CallArguments(_, text):
                    events.append(self._grown(self._open, text))
                case _:
                    assert_never(part)
        if logprobs and isinstance(self._open, Message):
            self._open.add_logprobs(logprobs)
            events[-1]["logprobs"] = logprobs
        return events

    def end(self, status: Status) -> list[Event]:
        """End the last item with ``status``; return its events. An answer has at least one item."""
        events = [] if self._open or self.items else self.add([Content("")])
        return events + self._end(status)

    def _begin(self, item: OpenItem) -> list[Event]:
        events = self._end("completed")
        self._open = item
        added = {"type": "response.output_item.added", "item": item.item("in_progress")}
        return events + self._placed([added, *item.begin()], item)

    def _grown(self, item: OpenItem | None, text: str) -> Event:
        assert item is not None, "a call's arguments come behind its beginning"
        return self._placed([item.grow(text)], item)[0]

    def _end(self, status: Status) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        whole = item.item(status)
        events = self._placed([*item.end(), {"type": "response.output_item.done", "item": whole}], item)
        self.items.append(whole)
        return events

    def _placed(self, events: list[Event], item: OpenItem) -> list[Event]:
        """Add to ``events`` which item they are about. Events that have the item need no id."""
        for event in events:
            event["output_index"] = len(self.items)
            if "item" not in event:
                event["item_id"] = item.id
        return events

    def _next_number(self) -> str:
        """Return the number of the item that is about to begin."""
        return f"{self._number}{len(self.items) + (self._open is not None):04x}"
