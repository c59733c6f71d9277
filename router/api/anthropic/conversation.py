"""``system`` and ``messages``: lists of content blocks, translated into the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from router.api.anthropic.cache_control import CacheMarks
from router.http.openai_errors import shown
from wire.errors import InvalidRequestError

_BLOCKS: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
        },
    ]
}
SYSTEM_SCHEMA: dict[str, Any] = {"anyOf": [*_BLOCKS["anyOf"], {"type": "null"}]}
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
    },
}

KINDS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""The types of blocks that each role may write."""


@dataclass(frozen=True, slots=True)
class Block:
    """A content block whose type was checked."""

    within: str
    """The place of the block's list in the body, for errors."""
    index: int | None
    """None for a text that is given in place of a list."""
    kind: str
    fields: dict[str, Any]

    @property
    def where(self) -> str:
        return _where(self.within, self.index)

    def text(self, name: str) -> str:
        """Return a field that must be a string."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise InvalidRequestError(f"{self.where}.{name} must be a string, got {shown(value)}")
        return value


@dataclass
class Turn:
    """What one role says until another one speaks. Consecutive messages of one role are one turn."""

    role: str
    blocks: list[Block]


def chat_messages(system: Any, messages: Any, marks: CacheMarks) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises :class:`InvalidRequestError` that names the block that is
    wrong."""
    chat: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    """The names of the tools that were called so far, by the calls' ids."""
    turns = _turns(system, messages, marks)
    for turn in turns:
        match turn.role:
            case "user":
                chat += _of_user(turn, names, marks)
            case "assistant":
                chat.append(_of_assistant(turn, names))
            case _:
                chat.append({"role": turn.role, "content": _joined(turn.blocks)})
    if turns[-1].role == "assistant":
        raise InvalidRequestError(
            f"messages[{len(messages) - 1}] is the assistant's: an answer that continues it is not "
            "supported, so the last message must be the user's"
        )
    return chat


def _turns(system: Any, messages: Any, marks: CacheMarks) -> list[Turn]:
    turns: list[Turn] = []
    if system not in (None, "", []):
        turns.append(Turn("system", _blocks(system, "system", KINDS["system"], marks)))
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"messages must be a list of at least one message, got {shown(messages)}")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(f"{where} must be an object, got {shown(message)}")
        role = message.get("role")
        if not isinstance(role, str) or role not in KINDS:
            raise InvalidRequestError(
                f"{where}.role must be 'user', 'assistant' or 'system', got {shown(role)}"
            )
        blocks = _blocks(message.get("content"), f"{where}.content", KINDS[role], marks)
        if turns and turns[-1].role == role:
            turns[-1].blocks += blocks
        else:
            turns.append(Turn(role, blocks))
    return turns


def _blocks(content: Any, where: str, kinds: tuple[str, ...], marks: CacheMarks) -> list[Block]:
    """Return the blocks of a content. A string is one block of text."""
    if isinstance(content, str):
        return [Block(where, None, "text", {"text": content})]
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(
            f"{where} must be a string or a list of at least one block, got {shown(content)}"
        )
    return [_block(block, where, i, kinds, marks) for i, block in enumerate(content)]


def _block(block: Any, within: str, index: int, kinds: tuple[str, ...], marks: CacheMarks) -> Block:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequestError(
            f"{_where(within, index)} must be an object with a type, got {shown(block)}"
        )
    if kind not in kinds:
        raise InvalidRequestError(
            f"{_where(within, index)} is of type {shown(kind)}, which is not supported here: "
            f"send {' or '.join(kinds)}"
        )
    if "cache_control" in block:
        marks.check(block, _where(within, index))
    return Block(within, index, kind, block)


def _where(within: str, index: int | None) -> str:
    return within if index is None else f"{within}[{index}]"


def _joined(blocks: list[Block]) -> str:
    return "\n".join(block.text("text") for block in blocks)


def _of_user(turn: Turn, names: dict[str, str], marks: CacheMarks) -> Iterator[dict[str, Any]]:
    """Yield what a user said and the results of calls, in their order."""
    said: list[Block] = []
    for block in turn.blocks:
        if block.kind == "text":
            said.append(block)
            continue
        if said:
            yield {"role": "user", "content": _joined(said)}
            said = []
        yield _result(block, names, marks)
    if said:
        yield {"role": "user", "content": _joined(said)}


def _result(block: Block, names: dict[str, str], marks: CacheMarks) -> dict[str, Any]:
    """Return the message with a call's result. The result of a call that failed begins with ``Error: ``,
    because no template has another mark for it."""
    call_id = block.text("tool_use_id")
    if call_id not in names:
        raise InvalidRequestError(
            f"{block.where}.tool_use_id is {shown(call_id)}, which is the id of no tool_use block before it"
        )
    content = block.fields.get("content")
    if content not in (None, "", []):
        content = _joined(_blocks(content, f"{block.where}.content", ("text",), marks))
    content = content or ""
    is_error = block.fields.get("is_error")
    if is_error not in (None, True, False):
        raise InvalidRequestError(f"{block.where}.is_error must be true or false, got {shown(is_error)}")
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "name": names[call_id],
        "content": f"Error: {content}" if is_error else content,
    }


def _of_assistant(turn: Turn, names: dict[str, str]) -> dict[str, Any]:
    """Return one message with all that the assistant thought, said and called. Redacted thinking is left
    out: nobody but its author can read it."""
    said, thought, calls = "", "", []
    for block in turn.blocks:
        match block.kind:
            case "text":
                said += block.text("text")
            case "thinking":
                thought += block.text("thinking")
            case "tool_use":
                calls.append(_call(block))
                names[calls[-1]["id"]] = calls[-1]["function"]["name"]
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block) -> dict[str, Any]:
    call_id, name, arguments = block.text("id"), block.text("name"), block.fields.get("input")
    if not name:
        raise InvalidRequestError(f"{block.where}.name must have at least 1 character, got 0")
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{block.where}.input must be an object, got {shown(arguments)}")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
