"""``tool_choice``: which of a chat's tools may be called, and whether one must be."""

from __future__ import annotations

from typing import Any

from router.http.openai_errors import shown
from router.models.chat_messages import checked_tools
from wire.errors import InvalidRequestError

FREE = (None, "none", "auto")
"""Choices that do not demand a call."""


def offered_tools(tools: Any, choice: Any) -> tuple[list[dict[str, Any]] | None, Any]:
    """Return the tools that are shown to the model, and the choice among them.

    The choice is None, ``none``, ``auto``, ``required`` or one function. ``allowed_tools`` becomes ``auto``
    or ``required`` among the allowed tools; the others are not shown to the model. Raises
    :class:`InvalidRequestError`.
    """
    tools = checked_tools(tools)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(tools, choice)
    return tools, _checked(choice, tools)


def _checked(choice: Any, tools: list[dict[str, Any]] | None) -> Any:
    """Return the choice. If it demands a call, there must be a tool to call."""
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
    """Return the name of a function, which must be one of the tools."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [one["function"]["name"] for one in tools or ()]:
        raise _wrong(f"tool_choice names {shown(name)}, which is none of the tools")
    return str(name)


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tool_choice")
