"""The format of Qwen3-Coder and of Nemotron 3 Nano: a tag for each parameter, texts without quotes.

<tool_call>
<function=look>
<parameter=at>
sky
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from router.models.grammar import literal, with_options
from router.models.tools.tool_format import Marks, Tool, ToolCall, length_of_beginning
from wire.errors import InvalidRequestError

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_BEGUN = re.compile(r"\s*<function=([^>\n]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_AS_TEXT = {"type", "description", "title", "default", "examples", "enum", "const"}
"""Keywords of a string's schema that this format can enforce."""
_SHARED: tuple[str, ...] = ("$defs", "definitions")


class Qwen3Coder:
    begin = "<tool_call>"
    end = "</tool_call>"

    def parse(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        match = _FUNCTION.fullmatch(block)
        if match is None:
            raise ValueError("a call must be <function=NAME> … </function>")
        name = match[1].strip()
        schemas = _schemas(name, tools)
        arguments = {
            key.strip(): _value(_without_lines(said), schemas.get(key.strip()))
            for key, said in _PARAMETER.findall(match[2])
        }
        return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))]

    def parse_cut(self, block: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """Return the call of a block that was cut off, with the JSON of its parameters. If the last value is
        not complete, the JSON has the part of the value that was written."""
        if "</function>" in block:
            return self.parse(block, tools)
        match = _BEGUN.fullmatch(block)
        if match is None:
            if not (begun := block.lstrip()).startswith("<function=") and not "<function=".startswith(begun):
                raise ValueError("a call must be <function=NAME> … </function>")
            return []
        name = match[1].strip()
        schemas, written = _schemas(name, tools), []
        for said in _PARAMETER.finditer(match[2]):
            key, schema = said[1].strip(), schemas.get(said[1].strip())
            if said[0].endswith("</parameter>"):
                value = json.dumps(_value(_without_lines(said[2]), schema), ensure_ascii=False)
            else:
                value = _begun(said[2], schema)
            written.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
        return [ToolCall(name, "{" + ", ".join(written))]

    def rules(self, tools: Sequence[Tool], marks: Marks, *, may_repeat: bool) -> list[str]:
        line = literal("\n")
        rules = [f"calls: {f'call ({line} call)*' if may_repeat else 'call'}"]
        rules.append(f"call: {marks.begin} {line} one {line} {marks.end}")
        rules.append(f"one: {' | '.join(f'tool{i}' for i in range(len(tools)))}")
        for i, tool in enumerate(tools):
            rules += _rules_of(tool, f"tool{i}")
        return rules


def _schemas(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schemas of the parameters of the tool that has this name."""
    for tool in tools:
        if tool.name == name:
            properties: dict[str, Any] = tool.parameters.get("properties", {})
            return properties
    return {}


def _begun(text: str, schema: Any) -> str:
    """Return the beginning of the JSON of a value that was cut off. Leave out what may be the beginning of
    its end tag."""
    said = text[: len(text) - length_of_beginning(text, "\n</parameter>")].removeprefix("\n")
    if isinstance(schema, dict) and not _is_text(schema):
        return said
    return json.dumps(said, ensure_ascii=False)[:-1]


def _rules_of(tool: Tool, rule: str) -> list[str]:
    """Return the rules for one tool. Parameters are in the schema's order; optional ones may be left out."""
    required = tool.parameters.get("required", [])
    parts, rules = [], []
    for i, (name, schema) in enumerate(tool.parameters.get("properties", {}).items()):
        parts.append(f"{rule}_{i}{'' if name in required else '?'}")
        rules.append(f"{rule}_{i}: {literal(f'<parameter={name}>')} {_value_rule(tool, name, schema)}")
    body = " ".join([literal(f"<function={tool.name}>\n"), *parts, literal("</function>")])
    return [f"{rule}: {body}", *rules]


def _value_rule(tool: Tool, name: str, schema: Any) -> str:
    """Return the rule for a value and its end tag. A text may end only at its end tag, so text and end tag
    are one terminal."""
    closing = "\n</parameter>\n"
    if not isinstance(schema, dict) or not _is_text(schema):
        # The definitions that the schema refers to are in the tool's own schema.
        whole = {key: tool.parameters[key] for key in _SHARED if key in tool.parameters}
        whole |= schema if isinstance(schema, dict) else {}
        return f"{literal(chr(10))} %json {with_options(whole)} {literal(closing)}"
    if further := schema.keys() - _AS_TEXT:
        raise InvalidRequestError(
            f"parameter {name!r} of tool {tool.name!r}: {', '.join(sorted(further))} can't be enforced, "
            "as this model writes texts in calls without quotes: use tool_choice 'auto'",
            param="tools",
        )
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is None:
        return r"/\n[^<]*\n<\/parameter>\n/"
    return "(" + " | ".join(literal(f"\n{choice}{closing}") for choice in choices) + ")"


def _is_text(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "string"


def _without_lines(value: str) -> str:
    """Remove the line breaks around a value, which is written on separate lines."""
    return value.removeprefix("\n").removesuffix("\n")


def _value(text: str, schema: Any) -> Any:
    """Return the value of a parameter. A text is returned unchanged. Any other value is parsed as JSON; if it
    is not valid JSON, it is returned as text."""
    if not isinstance(schema, dict) or _is_text(schema):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
