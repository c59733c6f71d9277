"""The format of Kimi K2. The model counts its calls and writes their ids.

<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "sky"}\
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading, UnreadableError
from router.models.tools.formats.json_calls import argument_rules, json_object, object_begins
from router.models.tools.part_writer import MAX_NAME_CHARS, PartWriter
from router.models.tools.tool_format import Terminal, Tool

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_END_OF_CALLS = "<|tool_calls_section_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(:[0-9]+)?", re.DOTALL)


class KimiK2:
    begins: tuple[str, ...] = ("<|tool_calls_section_begin|>",)
    first_of_call = ""
    marks: tuple[str, ...] = (_BEGIN, _ARGUMENTS, _END, _END_OF_CALLS)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        while not (yield from text.accept(_END_OF_CALLS)):
            yield from text.require(_BEGIN)
            call_id = (yield from text.before((_ARGUMENTS,), MAX_NAME_CHARS)).strip()
            yield from text.require(_ARGUMENTS)
            yield from object_begins(text)
            match = _ID.fullmatch(call_id)
            if match is None:
                raise UnreadableError
            calls.begin(match[1], call_id if match[2] else "")
            yield from json_object(text, calls.add)
            yield from text.skip_blanks()
            yield from text.require(_END)
            text.settle()
            yield from text.skip_blanks()

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        one = " | ".join(f"tool{i}" for i in range(len(tools)))
        behind_name = f"/[0-9]{{1,4}}/ {terminal(_ARGUMENTS)}"
        return [
            f"calls: begin {'call+' if may_repeat else 'call'} {terminal(_END_OF_CALLS)}",
            f"call: {terminal(_BEGIN)} ({one}) {terminal(_END)}",
            *(
                f"tool{i}: {literal(f'functions.{tool.name}:')} {behind_name} arguments{i}"
                for i, tool in enumerate(tools)
            ),
            *argument_rules(tools),
        ]
