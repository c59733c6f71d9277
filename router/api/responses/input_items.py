"""The items of ``input``: checked, in the form in which they are stored, and as the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router.http.openai_errors import shown
from wire.errors import InvalidRequestError

Item = dict[str, Any]

INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
}
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def checked_items(given: Any) -> list[Item]:
    """Return the items of a request's ``input``. A string is the message of a user.

    The items are new objects with the fields that the API defines and that mean something here. They replace
    those of the list one after the other, so that a long conversation is not in memory twice. Raises
    :class:`InvalidRequestError` that names the item.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise _wrong(f"input must be a string or a list of items, got {shown(given)}")
    for i, item in enumerate(given):
        given[i] = _checked(item, f"input[{i}]")
    return given


def _checked(item: Any, where: str) -> Item:
    if not isinstance(item, dict):
        raise _wrong(f"{where} must be an object, got {shown(item)}")
    kind = item.get("type", "message" if "role" in item else None)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise _wrong(
            f"{where} is of type {shown(kind)}, which is not supported here; items may be of type "
            f"{', '.join(_READERS)}"
        )
    checked = read(item, where)
    if item.get("id") is not None:
        checked["id"] = _string(item, "id", where)
    return checked


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    texts = _texts(item.get("content"), f"{where}.content")
    parts: list[Item] = [{"type": "input_text", "text": text} for text in texts]
    if role == "assistant":
        parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": role, "content": parts, "status": "completed"}


def _function_call(item: Item, where: str) -> Item:
    names = ("call_id", "name", "arguments")
    fields = {name: _string(item, name, where) for name in names}
    if not fields["name"]:
        raise _wrong(f"{where}.name must not be empty")
    return {"type": "function_call", **fields, "status": "completed"}


def _function_call_output(item: Item, where: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = "\n".join(_texts(output, f"{where}.output"))
    call_id = _string(item, "call_id", where)
    return {"type": "function_call_output", "call_id": call_id, "output": output, "status": "completed"}


def _reasoning(item: Item, where: str) -> Item:
    """Read an earlier turn's thinking. Encrypted thinking of another server says nothing to this one."""
    texts = {name: _texts(item.get(name) or [], f"{where}.{name}") for name in ("content", "summary")}
    return {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text} for text in texts["summary"]],
        "content": [{"type": "reasoning_text", "text": text} for text in texts["content"]],
        "status": "completed",
    }


_READERS: dict[str, Callable[[Item, str], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of a string or of a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _wrong(f"{where} must be a string or a list of text parts, got {shown(content)}")
    return [_text(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return _string(part, "refusal", where)
    if kind not in TEXT_PARTS:
        raise _wrong(
            f"{where} is {shown(kind or part)}, but the model takes text only: parts must be "
            '{"type": "input_text", "text": …}'
        )
    return _string(part, "text", where)


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name} must be a string, got {shown(value)}")
    return value


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="input")


# --- items as messages -----------------------------------------------------------------------------


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return checked items as the messages that chat templates read.

    What a model thought, said and called in one turn are several items, but one message. Templates know no
    role ``developer``, and many allow one system message only, at the beginning: instructions and the system
    messages right behind them become one message.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": [instructions]})
    for item in items:
        _ADDERS[item["type"]](messages, item)
    for message in messages:
        for name, between in _BETWEEN.items():
            if isinstance(message.get(name), list):
                message[name] = between.join(message[name])
    return messages


_BETWEEN = {"content": "\n\n", "reasoning_content": "\n"}
"""What stands between the texts of several items that become one field of one message. Such a field is a list
until all items are read: to lengthen a text of megabytes once for each item would block the router for half a
minute."""


def _add_message(messages: list[dict[str, Any]], item: Item) -> None:
    role = "system" if item["role"] == "developer" else item["role"]
    content = _joined(item["content"])
    last = messages[-1] if messages else {}
    if role == "assistant" and _has_just_thought(last):
        last["content"] = content
    elif role == "system" and len(messages) == 1 and last["role"] == "system":
        last["content"].append(content)
    else:
        messages.append({"role": role, "content": [content] if role == "system" else content})


def _add_call(messages: list[dict[str, Any]], item: Item) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _add_output(messages: list[dict[str, Any]], item: Item) -> None:
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})


def _add_reasoning(messages: list[dict[str, Any]], item: Item) -> None:
    thought = _joined(item["content"] or item["summary"])
    if messages and _has_just_thought(messages[-1]):
        messages[-1]["reasoning_content"].append(thought)
    elif thought:
        messages.append({"role": "assistant", "content": "", "reasoning_content": [thought]})


_ADDERS: dict[str, Callable[[list[dict[str, Any]], Item], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
}


def _has_just_thought(message: dict[str, Any]) -> bool:
    """Whether ``message`` consists of thinking alone, so that what comes next belongs to it."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _joined(parts: Sequence[Item]) -> str:
    return "\n".join(part["text"] for part in parts)
