"""A tag for each name and for each value. The format of GLM 4.5 to 4.7; the last one writes no line breaks.

<tool_call>look
<arg_key>at</arg_key>
<arg_value>sky</arg_value>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading, UnreadableError
from router.models.tools.formats.tagged_values import (
    Tags,
    argument_rules,
    read_arguments,
    schemas_of,
    text_rules,
)
from router.models.tools.part_writer import BARE_NAME, MAX_NAME_CHARS, PartWriter
from router.models.tools.tool_format import Terminal, Tool

_END = "</tool_call>"
_GAP = '"\\n"?'
_TAGS = Tags("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", gap=_GAP)


class Glm45:
    begins: tuple[str, ...] = ("<tool_call>",)
    first_of_call = ""
    marks: tuple[str, ...] = (_END, _TAGS.name, *_TAGS.behind_name, _TAGS.end)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        name = (yield from text.before((_TAGS.name, _END), MAX_NAME_CHARS)).strip()
        if not BARE_NAME.fullmatch(name):
            raise UnreadableError
        calls.begin(name)
        yield from read_arguments(text, calls, _TAGS, (_END,), schemas_of(name, tools))
        yield from text.require(_END)
        text.settle()

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        rules = [f"calls: {f'call ({_GAP} call)*' if may_repeat else 'call'}"]
        rules.append(f"call: begin one {terminal(_END)}")
        rules.append(f"one: {' | '.join(f'tool{i}' for i in range(len(tools)))}")
        for i, tool in enumerate(tools):
            rules.append(f"tool{i}: {literal(tool.name)} {_GAP} arguments{i}")
            rules += argument_rules(tool, f"arguments{i}", _TAGS, terminal)
        return rules + text_rules(_TAGS, terminal)
