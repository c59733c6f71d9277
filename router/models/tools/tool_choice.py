"""``tool_choice``: which of a chat's tools may be called, and whether one must be."""

from __future__ import annotations

from typing import Any

from router.http.openai_errors import shown
from router.models.chat_messages import checked_tools
from wire.errors import InvalidRequestError

FREE = (None, "none", "auto")
"""Choices that leave it to the model, or to nobody."""


def offered_tools(tools: Any, choice: Any) -> tuple[list[dict[str, Any]] | None, Any]:
    """The tools that the model is told of, and the choice among them.

    That is None, ``none``, ``auto``, ``required`` or one function. ``allowed_tools`` becomes ``auto`` or
    ``required`` among those that are allowed: of the others the model hears nothing.
    Raises :class:`InvalidRequestError`.
    """
    tools = checked_tools(tools)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(tools, choice)
    return tools, _checked(choice, tools)


def _checked(choice: Any, tools: list[dict[str, Any]] | None) -> Any:
    """A choice that asks for a call needs a tool that can be called."""
    if choice in FREE:
        return choice
    if choice != "required":
        if not isinstance(choice, dict) or choice.get("type") != "function":
            raise _wrong(
                "tool_choice must be 'none', 'auto', 'required', a function or allowed_tools, "
                f"got {shown(choice)}"
            )
        _require(choice, tools)
    if not tools:
        raise _wrong(f"tool_choice {shown(choice)} needs tools")
    return choice


def _allowed(
    tools: list[dict[str, Any]] | None, choice: dict[str, Any]
) -> tuple[list[dict[str, Any]] | None, Any]:
    said = choice.get("allowed_tools")
    mode, listed = (said.get("mode"), said.get("tools")) if isinstance(said, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise _wrong(f"tool_choice: allowed_tools.mode must be 'auto' or 'required', got {shown(mode)}")
    if not isinstance(listed, list) or not listed or not all(isinstance(tool, dict) for tool in listed):
        raise _wrong(
            "tool_choice: allowed_tools.tools must be a list of functions, "
            f'{{"type": "function", "function": {{"name": …}}}}, got {shown(listed)}'
        )
    if not tools:
        raise _wrong(f"tool_choice {shown(choice)} needs tools")
    names = [_require(tool, tools) for tool in listed]
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def _require(tool: dict[str, Any], tools: list[dict[str, Any]] | None) -> str:
    """The name of a function, which must be one of the tools."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [one["function"]["name"] for one in tools or ()]:
        raise _wrong(f"tool_choice names {shown(name)}, which is none of the tools")
    return str(name)


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tool_choice")
