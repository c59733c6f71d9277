"""How a model writes tool calls, and what the formats have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """The JSON text of an object, or the beginning of this text if the answer was cut off."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""

    @classmethod
    def of(cls, said: dict[str, Any]) -> Tool:
        """Make a tool from one item of a request's ``tools``. The item was checked before. A tool without
        ``parameters`` takes no arguments."""
        function = said["function"]
        parameters = function.get("parameters")
        return cls(function["name"], parameters or {"type": "object", "properties": {}})


@dataclass(frozen=True)
class Marks:
    """Lark terminals for the two marks of a format: texts, or special tokens if the model has such tokens."""

    begin: str
    end: str


class ToolFormat(Protocol):
    """One way to write calls: blocks between two marks, with one or several calls each."""

    begin: str
    end: str

    def parse(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """Return the calls in the text between the marks. Raises :class:`ValueError` if it is not a call."""

    def parse_cut(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """Return the calls of a block that was cut off. The last call's arguments may be only the beginning
        of a JSON text. A call without a complete name is left out. Raises :class:`ValueError` if the block
        does not begin a call at all."""

    def rules(self, tools: Sequence[Tool], marks: Marks, *, may_repeat: bool) -> list[str]:
        """Return Lark rules for one call of one of ``tools`` or, with ``may_repeat``, for several calls. The
        rule ``calls`` stands for all calls together."""


def call_from_json(value: Any) -> ToolCall:
    """Make a call of ``{"name": …, "arguments": {…}}``. Raises :class:`ValueError`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call must be an object with a name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write JSON in a string
        arguments = json.loads(arguments) if arguments else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("a call's arguments must be an object")
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def length_of_beginning(text: str, mark: str) -> int:
    """Return the length of the longest beginning of ``mark`` with which ``text`` ends. The whole mark does
    not count as a beginning."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
