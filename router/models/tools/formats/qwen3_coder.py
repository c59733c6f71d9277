"""A tag for each parameter. The format of Qwen3-Coder, Qwen 3.5 and Nemotron 3.

<tool_call>
<function=look>
<parameter=at>
sky
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.formats.tagged_values import (
    Tags,
    argument_rules,
    read_arguments,
    schemas_of,
    text_rules,
)
from router.models.tools.part_writer import MAX_NAME_CHARS, PartWriter
from router.models.tools.tool_format import Terminal, Tool

_END, _END_OF_FUNCTION = "</tool_call>", "</function>"
_TAGS = Tags(
    "<parameter=",
    (">",),
    "</parameter>",
    gap=literal("\n"),
    space="\n",
    missing_ends=("\n<parameter=", f"\n{_END_OF_FUNCTION}\n{_END}", f"\n{_END}"),
)


class Qwen3Coder:
    begins: tuple[str, ...] = ("<tool_call>",)
    first_of_call = ""
    marks: tuple[str, ...] = (_END,)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        yield from text.require("<function=")
        name = (yield from text.before((">",), MAX_NAME_CHARS)).strip()
        yield from text.require(">")
        calls.begin(name)
        yield from read_arguments(text, calls, _TAGS, (_END_OF_FUNCTION, _END), schemas_of(name, tools))
        yield from text.accept(_END_OF_FUNCTION)
        calls.aside((yield from text.before((_END,))))
        yield from text.require(_END)
        text.settle()

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        line = literal("\n")
        rules = [f"calls: {f'call ({line} call)*' if may_repeat else 'call'}"]
        rules.append(f"call: begin {line} one {line} {terminal(_END)}")
        rules.append(f"one: {' | '.join(f'tool{i}' for i in range(len(tools)))}")
        for i, tool in enumerate(tools):
            opening = literal(f"<function={tool.name}>\n")
            rules.append(f"tool{i}: {opening} arguments{i} {literal(_END_OF_FUNCTION)}")
            rules += argument_rules(tool, f"arguments{i}", _TAGS, terminal)
        return rules + text_rules(_TAGS, terminal)
