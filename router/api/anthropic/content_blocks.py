"""Content blocks: the parts of an answer in Anthropic's form, as a list and as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

import orjson
from pydantic_core import from_json, to_json

from router.models.answer_parts import CallArguments, CallBegun, Content, Part, Reasoning

SIGNATURE = "unsigned"
"""The signature of every thinking block. Clients send blocks back only if they have one. It proves nothing:
who wrote the thinking that comes back is not checked."""
TEXT = {"type": "text", "text": ""}
"""An empty block of text."""


class BlockEvents:
    """Turns the parts of one answer into events. Blocks come one after the other: a part that does not belong
    to the open block ends it and begins the next one."""

    def __init__(self) -> None:
        self._index = -1
        """The open block's place in the answer or, if no block is open, that of the last one."""
        self.kind: str | None = None
        """The open block's type."""

    @property
    def has_begun(self) -> bool:
        """Whether there is any block."""
        return self._index >= 0

    def of(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Return the events for new parts."""
        events: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Reasoning(text):
                    if self.kind != "thinking":
                        events += self.begin({"type": "thinking", "thinking": "", "signature": ""})
                    events.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case Content(text):
                    if self.kind != "text":
                        events += self.begin(TEXT)
                    events.append(self._delta({"type": "text_delta", "text": text}))
                case CallBegun(_, call_id, name):
                    events += self.begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case _:
                    assert_never(part)
        return events

    def begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """End the open block and begin another one."""
        events = self.end()
        self._index, self.kind = self._index + 1, block["type"]
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def end(self) -> list[dict[str, Any]]:
        """End the open block, if there is one."""
        if self.kind is None:
            return []
        events = []
        if self.kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        self.kind = None
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def whole_blocks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return the blocks of a whole answer: those that a client puts together from :class:`BlockEvents`."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    """The JSON text of each call's arguments, by the place of its block."""
    for part in parts:
        kind = blocks[-1]["type"] if blocks else None
        match part:
            case Reasoning(text):
                if kind != "thinking":
                    blocks.append({"type": "thinking", "thinking": "", "signature": SIGNATURE})
                blocks[-1]["thinking"] += text
            case Content(text):
                if kind != "text":
                    blocks.append(dict(TEXT))
                blocks[-1]["text"] += text
            case CallBegun(_, call_id, name):
                blocks.append({"type": "tool_use", "id": call_id, "name": name})
                arguments[len(blocks) - 1] = ""
            case CallArguments(_, text):
                arguments[len(blocks) - 1] += text
            case _:
                assert_never(part)
    for place, text in arguments.items():
        blocks[place]["input"] = _object(text)
    return blocks or [dict(TEXT)]


def _object(text: str) -> orjson.Fragment:
    """Return the JSON object of a call's arguments. Of an object that was cut off, values that are not
    complete are left out: Anthropic's clients read a stream's pieces in the same way.

    The object is JSON text again, because it may contain integers of any size.
    """
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        value = {}
    return orjson.Fragment(to_json(value, inf_nan_mode="null"))
