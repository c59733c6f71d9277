"""How a model writes tool calls, and what the formats have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.part_writer import PartWriter

Terminal = Callable[[str], str]
"""Returns the Lark terminal for a mark: a text, or a special token if the model has such a token."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""
    is_strict: bool = False
    """Whether its calls must follow the schema even if the model is free to call."""

    @classmethod
    def of(cls, said: dict[str, Any]) -> Tool:
        """Make a tool from one item of a request's ``tools``. The item was checked before. A tool without
        ``parameters`` takes no arguments."""
        function = said["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return cls(function["name"], parameters, function.get("strict") is True)


class ToolFormat(Protocol):
    """One way to write calls. A block is a mark and what belongs to it, with one or several calls."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The marks that begin a block. The first one is the one that is enforced. None if the format has no
        mark: an answer then is calls from its start, or there is no call in it."""

    @property
    def first_of_call(self) -> str:
        """The character with which calls begin in a format without begin marks. Else empty."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Further marks of the format that may be special tokens."""

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        """Read a block behind its begin mark. Raises :class:`UnreadableError` where the text is no call."""

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        """Return Lark rules for one call of one of ``tools`` or, with ``may_repeat``, for several calls. The
        rule ``calls`` stands for all calls together. The rule ``begin``, which is defined elsewhere, stands
        for the mark that begins a block."""


def definitions(tool: Tool) -> dict[str, Any]:
    """Return the definitions in a tool's schema, to which the schemas of its parameters may refer."""
    return {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
