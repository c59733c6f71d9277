"""The thinking of a conversation's earlier turns, in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.models.chat_messages import REASONING_NAMES
from router.models.reasoning.reasoning_format import ReasoningFormat


def with_reasoning(messages: Sequence[dict[str, Any]], form: ReasoningFormat | None) -> list[dict[str, Any]]:
    """Return the messages with the thinking of each assistant's turn under both names, and not in its
    content.

    Templates decide which turns' thinking the model sees. Templates write line breaks around it themselves.
    """
    return [_divided(message, form) if message["role"] == "assistant" else message for message in messages]


def _divided(message: dict[str, Any], form: ReasoningFormat | None) -> dict[str, Any]:
    thinking = next((said for name in REASONING_NAMES if (said := message.get(name))), None)
    rest = {name: value for name, value in message.items() if name not in REASONING_NAMES}
    if thinking is None and form is not None:
        thinking, rest["content"] = _inline(message["content"], form)
    return rest if thinking is None else rest | dict.fromkeys(REASONING_NAMES, thinking.strip("\n"))


def _inline(content: str, form: ReasoningFormat) -> tuple[str | None, str]:
    """Return the thinking that a content begins with, and the content behind it."""
    said = content.lstrip()
    begin = next((mark for mark in form.begins if said.startswith(mark)), None)
    if begin is not None:
        for end in form.ends:
            thinking, mark, behind = said.removeprefix(begin).partition(end)
            if mark:
                return thinking, behind.lstrip("\n")
    return None, content
