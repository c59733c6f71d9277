"""A tag for each parameter, all calls in one block. The format of MiniMax M2.

<minimax:tool_call>
<invoke name="look">
<parameter name="at">sky</parameter>
</invoke>
</minimax:tool_call>
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

_END, _END_OF_CALL = "</minimax:tool_call>", "</invoke>"
_TAGS = Tags('<parameter name="', ('">',), "</parameter>", gap=literal("\n"))


class MiniMaxM2:
    begins: tuple[str, ...] = ("<minimax:tool_call>",)
    first_of_call = ""
    marks: tuple[str, ...] = (_END,)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        while not (yield from text.accept(_END)):
            yield from text.require('<invoke name="')
            name = yield from text.before(('">',), MAX_NAME_CHARS)
            yield from text.require('">')
            calls.begin(name)
            yield from read_arguments(text, calls, _TAGS, (_END_OF_CALL, _END), schemas_of(name, tools))
            yield from text.accept(_END_OF_CALL)
            text.settle()
            yield from text.skip_blanks()

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        line, end_of_call = literal("\n"), literal(f"{_END_OF_CALL}\n")
        rules = [f"calls: begin {line} {'call+' if may_repeat else 'call'} {terminal(_END)}"]
        rules.append(f"call: ({' | '.join(f'tool{i}' for i in range(len(tools)))}) {end_of_call}")
        for i, tool in enumerate(tools):
            opening = literal(f'<invoke name="{tool.name}">\n')
            rules.append(f"tool{i}: {opening} arguments{i}")
            rules += argument_rules(tool, f"arguments{i}", _TAGS, terminal)
        return rules + text_rules(_TAGS, terminal)
