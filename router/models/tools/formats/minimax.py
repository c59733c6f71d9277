"""One JSON object a line, all lines in one block. The format of MiniMax M1.

<tool_calls>
{"name": "look", "arguments": {"at": "sky"}}
{"name": "wait", "arguments": {}}
</tool_calls>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.formats.json_calls import call_rules, json_call
from router.models.tools.part_writer import PartWriter
from router.models.tools.tool_format import Terminal, Tool


class MiniMax:
    begins: tuple[str, ...] = ("<tool_calls>",)
    first_of_call = ""
    marks: tuple[str, ...] = ("</tool_calls>",)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        while not (yield from text.accept(*self.marks)):
            yield from json_call(text, calls)
            yield from text.skip_blanks()

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        line, end = literal("\n"), terminal(self.marks[0])
        calls = f"one ({line} one)*" if may_repeat else "one"
        return [f"calls: begin {line} {calls} {line} {end}", *call_rules(tools)]
