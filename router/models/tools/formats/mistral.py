"""The formats of Mistral: a list, or since 2025 a mark for each call.

[TOOL_CALLS][{"name": "look", "arguments": {"at": "sky"}, "id": "9Vqj3hBzn"}]
[TOOL_CALLS]look[ARGS]{"at": "sky"}
[TOOL_CALLS]look[CALL_ID]9Vqj3hBzn[ARGS]{"at": "sky"}
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from router.models.grammar import literal
from router.models.tools.arriving_text import ArrivingText, Reading, UnreadableError
from router.models.tools.formats.json_calls import (
    argument_rules,
    call_rules,
    json_list,
    json_object,
    object_begins,
)
from router.models.tools.part_writer import BARE_NAME, MAX_NAME_CHARS, PartWriter
from router.models.tools.tool_format import Terminal, Tool

_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Mistral's templates refuse other ids."""
_ARGUMENTS = "[ARGS]"
_CALL_ID = "[CALL_ID]"


class Mistral:
    begins: tuple[str, ...] = ("[TOOL_CALLS]",)
    first_of_call = ""
    marks: tuple[str, ...] = (_ARGUMENTS, _CALL_ID)

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        if (yield from text.peek()) == "[":
            yield from json_list(text, calls, _new_id)
            return
        name = (yield from text.before((_ARGUMENTS, _CALL_ID, "{"), MAX_NAME_CHARS)).strip()
        if not BARE_NAME.fullmatch(name):
            raise UnreadableError
        call_id = ""
        if (yield from text.accept(_CALL_ID)):
            call_id = yield from text.before((_ARGUMENTS, "{"), MAX_NAME_CHARS)
        yield from text.accept(_ARGUMENTS)
        yield from object_begins(text)
        calls.begin(name, call_id if _ID.fullmatch(call_id) else _new_id())
        yield from json_object(text, calls.add)

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        arguments = terminal(_ARGUMENTS)
        if arguments == literal(_ARGUMENTS):  # no token of the model, so it writes lists
            calls = f"one ({literal(', ')} one)*" if may_repeat else "one"
            call_id = f"""({literal(', "id": ')} /"[a-zA-Z0-9]{{9}}"/)?"""
            rules = call_rules(tools, further=call_id)
            return [f"calls: begin {literal('[')} {calls} {literal(']')}", *rules]
        behind_name = f"({terminal(_CALL_ID)} /[a-zA-Z0-9]{{9}}/)? {arguments}"
        one = " | ".join(f"tool{i}" for i in range(len(tools)))
        return [
            f"calls: {'call+' if may_repeat else 'call'}",
            f"call: begin ({one})",
            *(f"tool{i}: {literal(tool.name)} {behind_name} arguments{i}" for i, tool in enumerate(tools)),
            *argument_rules(tools),
        ]


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
