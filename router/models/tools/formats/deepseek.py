"""The formats of DeepSeek. All calls stand in one block, each between marks of its own.

V3 and R1 write JSON in a Markdown block:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look
```json
{"at": "sky"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes the name and the JSON:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "sky"}<｜tool▁call▁end｜>\
<｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.formats.json_calls import argument_rules, json_object, object_begins
from router.models.tools.part_writer import MAX_NAME_CHARS, PartWriter
from router.models.tools.tool_format import Terminal, Tool

_SEP = "<｜tool▁sep｜>"
_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_END_OF_CALLS = "<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class DeepSeek:
    before_name: tuple[str, ...]
    """Marks and texts before a call's name."""
    before_arguments: str
    behind_arguments: str
    between_calls: str
    first_of_call: str = ""
    begins: tuple[str, ...] = ("<｜tool▁calls▁begin｜>",)
    marks: tuple[str, ...] = (_BEGIN, _SEP, _END, _END_OF_CALLS)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        while not (yield from text.accept(_END_OF_CALLS)):
            for mark in self.before_name:
                yield from text.require(mark)
            name = yield from text.before((self.before_arguments,), MAX_NAME_CHARS)
            yield from text.require(self.before_arguments)
            yield from object_begins(text)
            calls.begin(name.strip())
            yield from json_object(text, calls.add)
            yield from text.skip_blanks()
            if self.behind_arguments:
                yield from text.require(self.behind_arguments.strip())
                yield from text.skip_blanks()
            yield from text.require(_END)
            text.settle()
            yield from text.skip_blanks()

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        def written(text: str) -> str:
            return terminal(text) if text in self.marks else literal(text)

        head = " ".join(map(written, self.before_name))
        between = literal(self.between_calls) if self.between_calls else ""
        calls = f"call ({between} call)*" if may_repeat else "call"
        one = " | ".join(f"tool{i}" for i in range(len(tools)))
        behind = literal(self.behind_arguments) if self.behind_arguments else ""
        return [
            f"calls: begin {calls} {terminal(_END_OF_CALLS)}",
            f"call: {head} ({one}) {behind} {terminal(_END)}",
            *(
                f"tool{i}: {literal(tool.name)} {written(self.before_arguments)} arguments{i}"
                for i, tool in enumerate(tools)
            ),
            *argument_rules(tools),
        ]


DEEPSEEK_V3 = DeepSeek((_BEGIN, "function", _SEP), "\n```json\n", "\n```", "\n")
DEEPSEEK_V31 = DeepSeek((_BEGIN,), _SEP, "", "")
