"""Formats whose calls are JSON: ``{"name": …, "arguments": {…}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from router.models.grammar import literal, with_options
from router.models.tools.tool_format import Marks, Tool, ToolCall, call_from_json


class Hermes:
    """One object in each block. Used by Hermes, Qwen 2.5 and 3, and many others.

    <tool_call>
    {"name": "look", "arguments": {"at": "sky"}}
    </tool_call>
    """

    begin = "<tool_call>"
    end = "</tool_call>"

    def parse(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        return [call_from_json(json.loads(block))]

    def parse_cut(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        begun = cut_call(block)
        return [] if begun is None else [begun]

    def rules(self, tools: Sequence[Tool], marks: Marks, *, may_repeat: bool) -> list[str]:
        line = literal("\n")
        calls = f"call ({line} call)*" if may_repeat else "call"
        return [f"calls: {calls}", f"call: {marks.begin} {line} one {line} {marks.end}", *_one_of(tools)]


class NemotronJson:
    """All calls in one list. Used by Nemotron Nano 2.

    <TOOLCALL>[{"name": "look", "arguments": {"at": "sky"}}]</TOOLCALL>
    """

    begin = "<TOOLCALL>"
    end = "</TOOLCALL>"

    def parse(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        values = json.loads(block)
        if not isinstance(values, list) or not values:
            raise ValueError("calls must be a list")
        return [call_from_json(value) for value in values]

    def parse_cut(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        return cut_calls(block)

    def rules(self, tools: Sequence[Tool], marks: Marks, *, may_repeat: bool) -> list[str]:
        calls = f"one ({literal(', ')} one)*" if may_repeat else "one"
        return [f"calls: {marks.begin} {literal('[')} {calls} {literal(']')} {marks.end}", *_one_of(tools)]


def _one_of(tools: Sequence[Tool]) -> list[str]:
    """Return the rule ``one``, for the object of one call, and the rules that it uses. Arguments have
    separate rules, since a schema may refer to itself."""
    rules = [f"one: {' | '.join(f'tool{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        opening = literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
        rules.append(f"tool{i}: {opening} arguments{i} {literal('}')}")
        rules.append(f"arguments{i}: %json {with_options(tool.parameters)}")
    return rules


_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"[ \t\n\r]*")
_ARGUMENTS = ("arguments", "parameters")
_MAX_ESCAPE_CHARS = 6
"""The length of a character that JSON writes as ``\\u0041``."""


def cut_call(text: str) -> ToolCall | None:
    """Return the call that ``text`` begins. If the text ends within the arguments, the call has only
    the beginning of the arguments, which is not valid JSON.

    None if the name is not complete. Raises :class:`ValueError` for a text that does not begin an object.
    """
    at = _skip(text, 0)
    if text[at : at + 1] not in ("{", ""):
        raise ValueError("a call must be an object")
    name, arguments, key = "", "", None
    try:
        while text[at : at + 1] in ("{", ","):
            key, at = _DECODER.raw_decode(text, _skip(text, at + 1))
            at = _skip(text, at)
            if text[at : at + 1] != ":":
                break
            at = _skip(text, at + 1)
            value, end = _DECODER.raw_decode(text, at)
            if key == "name" and isinstance(value, str):
                name = value
            elif key in _ARGUMENTS:
                arguments = _whole(value)
            key, at = None, _skip(text, end)
    except ValueError:
        if key in _ARGUMENTS:
            arguments = _begun(text[at:])
    return ToolCall(name, arguments) if name else None


def cut_calls(text: str) -> list[ToolCall]:
    """Return the calls of the list that ``text`` begins: complete ones, then perhaps one that is not
    complete.

    Raises :class:`ValueError` for a text that does not begin a list of objects.
    """
    calls: list[ToolCall] = []
    at = _skip(text, 0)
    if text[at : at + 1] not in ("[", ""):
        raise ValueError("calls must be a list")
    while text[at : at + 1] in ("[", ","):
        at = _skip(text, at + 1)
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            begun = cut_call(text[at:])
            return calls if begun is None else [*calls, begun]
        calls.append(call_from_json(value))
        at = _skip(text, end)
    return calls


def _begun(value: str) -> str:
    """Return arguments that are not complete. Some models write them as JSON in a string."""
    if not value.startswith('"'):
        return value if value.startswith("{") else ""
    for num_left_out in range(min(_MAX_ESCAPE_CHARS, len(value))):
        try:
            said: Any = json.loads(value[: len(value) - num_left_out] + '"')
        except ValueError:  # the text ends within an escape
            continue
        return said if isinstance(said, str) else ""
    return ""


def _whole(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else ""


def _skip(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return at if match is None else match.end()
