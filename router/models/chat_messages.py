"""The messages and tools of a chat, checked and in the form that chat templates read."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from router.http.bodies.json_shape import check_shape
from router.http.openai_errors import shown
from wire.errors import InvalidRequestError

_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
REASONING_NAMES = ("reasoning_content", "reasoning")
"""The fields of messages that have the thinking: DeepSeek's name, which templates read, and vLLM's."""
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]
            },
            **{name: {"anyOf": [{"type": "string"}, {"type": "null"}]} for name in REASONING_NAMES},
        },
    },
}
TOOLS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string", "minLength": 1}},
                    },
                },
            },
        },
        {"type": "null"},
    ]
}


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages, each with one text as its content. Raises :class:`InvalidRequestError` that names
    the message.

    The messages replace those of the list one after the other, so that a long conversation is not in memory
    twice.
    """
    if not isinstance(messages, list) or not messages:
        raise _wrong(f"messages must be a list of at least one message, got {shown(messages)}")
    for i, message in enumerate(messages):
        messages[i] = _message(message, f"messages[{i}]")
    return messages


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the function tools unchanged. None if there are none."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise _wrong(f"tools must be a list, got {shown(tools)}", "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise _wrong(f"tools[{i}] must be an object of type 'function', got {shown(tool)}", "tools")
        if not _is_named(tool.get("function")):
            raise _wrong(f"tools[{i}].function must be an object with a name, got {shown(tool)}", "tools")
        parameters = tool["function"].get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise _wrong(
                f"tools[{i}].function.parameters must be an object, got {shown(parameters)}", "tools"
            )
    return tools


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(f"{where} must be an object, got {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where}.role must be a string, got {shown(role)}")
    checked = {**message, "content": _content(message.get("content"), role, f"{where}.content")}
    for name in REASONING_NAMES:
        if not isinstance(message.get(name), str | None):
            raise _wrong(f"{where}.{name} must be a string, got {shown(message[name])}")
    calls = checked.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise _wrong(f"{where}.tool_calls must be a list, got {shown(calls)}")
        checked["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return checked


def _content(content: Any, role: str, where: str) -> str:
    """Return the content as one text, with a line break between two parts."""
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":  # it may have called tools instead
        return ""
    if not isinstance(content, list):
        raise _wrong(f"{where} must be a string or a list of text parts, got {shown(content)}")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else None
            raise _wrong(
                f"{where}[{i}] is {shown(kind or part)}, but the model takes text only: parts must be "
                '{"type": "text", "text": …}'
            )
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{i}].text must be a string, got {shown(part.get('text'))}")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return the call with ``arguments`` as an object, as templates want it. Clients send JSON in a
    string."""
    if not isinstance(call, dict) or not _is_named(call.get("function")):
        raise _wrong(f"{where}.function must be an object with a name, got {shown(call)}")
    function = call["function"]
    arguments = function.get("arguments")
    if arguments in (None, ""):
        arguments = {}
    elif isinstance(arguments, str):
        check_shape(arguments.encode(), what=f"{where}.function.arguments", param="messages")
        try:
            arguments = from_json(arguments, allow_inf_nan=False)
        except ValueError as error:
            raise _wrong(f"{where}.function.arguments is not valid JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _is_named(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _wrong(message: str, param: str = "messages") -> InvalidRequestError:
    return InvalidRequestError(message, param=param)
