"""All calls in one JSON list. The format of Nemotron Nano 2.

<TOOLCALL>[{"name": "look", "arguments": {"at": "sky"}}]</TOOLCALL>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.formats.json_calls import call_rules, json_list
from router.models.tools.part_writer import PartWriter
from router.models.tools.tool_format import Terminal, Tool


class NemotronJson:
    begins: tuple[str, ...] = ("<TOOLCALL>",)
    first_of_call = ""
    marks: tuple[str, ...] = ("</TOOLCALL>",)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        yield from json_list(text, calls)
        yield from text.skip_blanks()
        yield from text.require(*self.marks)

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        calls = f"one ({literal(', ')} one)*" if may_repeat else "one"
        end = terminal(self.marks[0])
        return [f"calls: begin {literal('[')} {calls} {literal(']')} {end}", *call_rules(tools)]
