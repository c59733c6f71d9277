"""How a model writes calls of tools, and what the formats have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""

    @classmethod
    def of(cls, said: dict[str, Any]) -> Tool:
        """``said`` is an item of a request's ``tools``, checked; parameters that are left out are none."""
        function = said["function"]
        parameters = function.get("parameters")
        return cls(function["name"], parameters or {"type": "object", "properties": {}})


@dataclass(frozen=True)
class Marks:
    """Lark terminals for the two marks of a format: texts, or special tokens where a model has such."""

    begin: str
    end: str


class ToolFormat(Protocol):
    """One way to write calls: blocks between two marks, each with one call or several."""

    begin: str
    end: str

    def parse(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """The calls of what stands between the marks. Raises :class:`ValueError` if it is none."""

    def parse_cut(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """The calls of a block that ends before its end, the last one's arguments as far as they go: no JSON,
        but its beginning. A call without a complete name is none. Raises :class:`ValueError` if it begins no
        call at all."""

    def rules(self, tools: Sequence[Tool], marks: Marks, *, may_repeat: bool) -> list[str]:
        """Lark rules, ``calls`` among them, for one call of one of ``tools`` or, ``may_repeat``, several."""


def call_from_json(value: Any) -> ToolCall:
    """Of ``{"name": …, "arguments": {…}}``. Raises :class:`ValueError`."""
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
    """Of the longest end of ``text`` that begins ``mark``."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
