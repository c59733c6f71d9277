"""All calls in one JSON list that no mark ends. The format of Granite 3; Granite 4 writes ``hermes``.

<|tool_call|>[{"name": "look", "arguments": {"at": "sky"}}]
"""

from __future__ import annotations

from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.formats.json_calls import call_rules, json_list
from router.models.tools.part_writer import PartWriter
from router.models.tools.tool_format import Terminal, Tool


class Granite:
    begins: tuple[str, ...] = ("<|tool_call|>", "<tool_call>")
    """Granite 3.1 writes the second one."""
    first_of_call = ""
    marks: tuple[str, ...] = ()

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        yield from json_list(text, calls)

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        calls = f"one ({literal(', ')} one)*" if may_repeat else "one"
        return [f"calls: begin {literal('[')} {calls} {literal(']')}", *call_rules(tools)]
