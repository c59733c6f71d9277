"""Formats whose calls are JSON: ``{"name": …, "arguments": {…}}``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.grammar import literal, with_options
from router.tool_calls.cut_call import cut_call, cut_calls
from router.tool_calls.tool_format import Marks, Tool, ToolCall, call_from_json


class Hermes:
    """One object a block; Hermes, Qwen 2.5 and 3, and many others.

    <tool_call>
    {"name": "look", "arguments": {"at": "sky"}}
    </tool_call>
    """

    begin = "<tool_call>"
    end = "</tool_call>"

    def parse(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        return [call_from_json(json.loads(block))]

    def parse_cut(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        begun = cut_call(block)
        return [] if begun is None else [begun]

    def rules(self, tools: Sequence[Tool], marks: Marks, *, may_repeat: bool) -> list[str]:
        line = literal("\n")
        calls = f"call ({line} call)*" if may_repeat else "call"
        return [f"calls: {calls}", f"call: {marks.begin} {line} one {line} {marks.end}", *_one_of(tools)]


class NemotronJson:
    """All calls in one list; Nemotron Nano 2.

    <TOOLCALL>[{"name": "look", "arguments": {"at": "sky"}}]</TOOLCALL>
    """

    begin = "<TOOLCALL>"
    end = "</TOOLCALL>"

    def parse(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        values = json.loads(block)
        if not isinstance(values, list) or not values:
            raise ValueError("calls must be a list")
        return [call_from_json(value) for value in values]

    def parse_cut(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        return cut_calls(block)

    def rules(self, tools: Sequence[Tool], marks: Marks, *, may_repeat: bool) -> list[str]:
        calls = f"one ({literal(', ')} one)*" if may_repeat else "one"
        return [f"calls: {marks.begin} {literal('[')} {calls} {literal(']')} {marks.end}", *_one_of(tools)]


def _one_of(tools: Sequence[Tool]) -> list[str]:
    """Rule ``one``: a call's object. Arguments are a grammar of their own: a schema may refer to itself."""
    rules = [f"one: {' | '.join(f'tool{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        opening = literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
        rules.append(f"tool{i}: {opening} arguments{i} {literal('}')}")
        rules.append(f"arguments{i}: %json {with_options(tool.parameters)}")
    return rules
