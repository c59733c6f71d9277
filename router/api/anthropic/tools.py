"""``tools`` and ``tool_choice``, translated into those of a chat."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from router.api.anthropic.cache_control import CacheMarks
from router.http.openai_errors import shown
from wire.errors import InvalidRequestError

TOOLS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "input_schema"],
                "properties": {
                    "type": {"enum": ["custom", None]},
                    "name": {"type": "string", "minLength": 1},
                    "description": {"type": "string"},
                    "input_schema": {"type": "object"},
                    "strict": {"type": "boolean"},
                },
            },
        },
        {"type": "null"},
    ]
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""A chat's words for the types of choices."""


class ToolChoice(BaseModel):
    """Which tools the model may call, and whether it must."""

    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a chat that say the same."""
        choice: Any = CHOICES.get(self.type)
        if self.type == "tool":
            if not self.name:
                raise InvalidRequestError(
                    f"tool_choice.name must be the name of a tool, got {shown(self.name)}"
                )
            choice = {"type": "function", "function": {"name": self.name}}
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


def chat_tools(tools: Any, marks: CacheMarks) -> list[dict[str, Any]]:
    """Return a chat's tools. Raises :class:`InvalidRequestError` that names the tool that is wrong."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidRequestError(f"tools must be a list, got {shown(tools)}")
    return [_tool(tool, f"tools[{i}]", marks) for i, tool in enumerate(tools)]


def _tool(tool: Any, where: str, marks: CacheMarks) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequestError(f"{where} must be an object, got {shown(tool)}")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequestError(
            f"{where} is of type {shown(kind)}, which only Anthropic's own service has: give tools of type "
            "'custom', which the client runs"
        )
    marks.check(tool, where)
    function: dict[str, Any] = {}
    for theirs, ours, of, said in _FIELDS:
        value = tool.get(theirs)
        if not isinstance(value, of) or (ours == "name" and not value):
            raise InvalidRequestError(f"{where}.{theirs} must be {said}, got {shown(value)}")
        if value is not None:
            function[ours] = value
    return {"type": "function", "function": function}


_FIELDS: tuple[tuple[str, str, Any, str], ...] = (
    ("name", "name", str, "a string that is not empty"),
    ("description", "description", str | None, "a string"),
    ("input_schema", "parameters", dict, "an object, the JSON schema of the tool's input"),
    ("strict", "strict", bool | None, "true or false"),
)
"""Of each field of a tool: its name, its name in a chat, its types, and these in words."""
