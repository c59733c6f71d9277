"""Calls in JSON that end before they are complete: what is certain of them."""

from __future__ import annotations

import json
import re
from typing import Any

from router.tool_calls.tool_format import ToolCall, call_from_json

_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"[ \t\n\r]*")
_ARGUMENTS = ("arguments", "parameters")
_MAX_ESCAPE_CHARS = 6
"""Of a character that JSON writes as ``\\u0041``."""


def cut_call(text: str) -> ToolCall | None:
    """The call that ``text`` begins: its arguments end where it ends, and are no JSON then.

    None as long as the name is not complete. Raises :class:`ValueError` for a text that begins no object.
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
    """Those of a list that ``text`` begins: complete ones, then perhaps one that is not.

    Raises :class:`ValueError` for a text that begins no list of objects.
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
    """Arguments that are not complete; some models write them as JSON in a string."""
    if not value.startswith('"'):
        return value if value.startswith("{") else ""
    for num_left_out in range(min(_MAX_ESCAPE_CHARS, len(value))):
        try:
            said: Any = json.loads(value[: len(value) - num_left_out] + '"')
        except ValueError:  # an escape is cut as well
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
