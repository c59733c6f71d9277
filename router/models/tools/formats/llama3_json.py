"""JSON objects with ``;`` between them, and nothing else in the answer. The format of Llama 3.1 to 3.3.

{"name": "look", "parameters": {"at": "sky"}}
"""

from __future__ import annotations

from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.formats.json_calls import call_rules, json_call
from router.models.tools.part_writer import PartWriter
from router.models.tools.tool_format import Terminal, Tool


class Llama3Json:
    begins: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    first_of_call = "{"

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        if (yield from text.accept("<|python_tag|>")):
            yield from text.skip_blanks()
        is_followed = True
        while is_followed:
            yield from json_call(text, calls)
            yield from text.skip_blanks()
            if is_followed := bool((yield from text.accept(";"))):
                yield from text.skip_blanks()

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        calls = f"one ({literal('; ')} one)*" if may_repeat else "one"
        return [f"calls: {calls}", *call_rules(tools, key="parameters")]
