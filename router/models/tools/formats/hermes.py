"""One JSON object in each block. The format of Hermes, Qwen 2.5 and 3, Granite 4 and many others.

<tool_call>
{"name": "look", "arguments": {"at": "sky"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.formats.json_calls import call_rules, json_call
from router.models.tools.part_writer import PartWriter
from router.models.tools.tool_format import Terminal, Tool


class Hermes:
    begins: tuple[str, ...] = ("<tool_call>",)
    first_of_call = ""
    marks: tuple[str, ...] = ("</tool_call>",)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        while not (yield from text.accept(*self.marks)):
            yield from json_call(text, calls)
            yield from text.skip_blanks()

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        line, end = literal("\n"), terminal(self.marks[0])
        calls = f"call ({line} call)*" if may_repeat else "call"
        return [f"calls: {calls}", f"call: begin {line} one {line} {end}", *call_rules(tools)]
