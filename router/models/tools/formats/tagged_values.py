"""Arguments that stand between tags, one parameter after the other. Texts have no quotes there.

A text becomes JSON as it arrives. Any other value becomes JSON once it is complete, since only then it is
certain that it is JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from router.models.grammar import literal, with_options
from router.models.tools.arriving_text import ArrivingText, Reading
from router.models.tools.part_writer import MAX_NAME_CHARS, PartWriter
from router.models.tools.tool_format import Terminal, Tool, definitions
from wire.errors import InvalidRequestError

_AS_TEXT = {"type", "description", "title", "default", "examples", "enum", "const"}
"""Keywords of a string's schema that these formats can enforce."""
_TYPES: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"integer", "number"}),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
_ANY_NAME = '/[^<>"]+/'
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Some templates write these in earlier calls, so models do as well."""


@dataclass(frozen=True)
class Tags:
    """What a format writes around the names and the values of parameters."""

    name: str
    """Before a parameter's name."""
    behind_name: tuple[str, ...]
    """Between the name and the value. Blanks may stand between two of these tags."""
    end: str
    """Behind the value."""
    gap: str
    """The Lark rule for what stands between two tags."""
    space: str = ""
    """Stands before and behind the value, and is no part of it."""
    missing_ends: tuple[str, ...] = ()
    """Texts that end a value too, because models forget its end tag."""


def read_arguments(
    text: ArrivingText, calls: PartWriter, tags: Tags, closings: tuple[str, ...], schemas: dict[str, Any]
) -> Reading[None]:
    """Read the parameters of a call that has begun, up to one of ``closings``, which is not taken.
    ``schemas`` are those of the parameters."""
    calls.add("{")
    comma = ""
    while True:
        calls.aside((yield from text.before((tags.name, *closings))))
        if not (yield from text.accept(tags.name)):
            break
        name = (yield from text.before(tags.behind_name[:1], MAX_NAME_CHARS)).strip()
        for tag in tags.behind_name:
            yield from text.skip_blanks()
            yield from text.require(tag)
        if tags.space:
            yield from text.accept(tags.space)
        key = f"{comma}{json.dumps(name, ensure_ascii=False)}: "
        yield from _read_value(text, calls, key, tags, schemas.get(name))
        comma = ", "
    calls.add("}")


def _read_value(text: ArrivingText, calls: PartWriter, key: str, tags: Tags, schema: Any) -> Reading[None]:
    ends = (f"{tags.space}{tags.end}", tags.end) if tags.space else (tags.end,)
    stops = ends + tags.missing_ends
    if _is_text(schema):
        calls.add(f'{key}"')
        is_over = False
        while not is_over:
            said, is_over = text.upto(stops)
            calls.add(json.dumps(said, ensure_ascii=False)[1:-1])
            if not is_over:
                yield
        calls.add('"')
    else:
        said = yield from text.before(stops)
        calls.add(key + json_of(said, types_of(schema)))
    yield from text.accept(*ends)
    text.settle()


def schemas_of(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schemas of the parameters of the tool that has this name."""
    for tool in tools:
        if tool.name == name:
            properties = tool.parameters.get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def types_of(schema: Any) -> frozenset[str] | None:
    """Return the JSON types that a schema allows. None if it does not say them at its top."""
    if not isinstance(schema, dict):
        return None
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset({said})
    if isinstance(said, list):
        return frozenset(one for one in said if isinstance(one, str))
    options = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(options, list):
        return None
    types = [types_of(option) for option in options]
    known = [one for one in types if one is not None]
    return frozenset[str]().union(*known) if len(known) == len(types) else None


def json_of(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of a value. A value that is no JSON is a text. So is one that is JSON of another type,
    if it may be a text."""
    said = text.strip()
    said = _PYTHON_WORDS.get(said, said)
    try:
        found = _types_of_json(said)
        is_wanted = types is None or "string" not in types or not types.isdisjoint(found)
    except (ValueError, RecursionError):
        is_wanted = False
    return said if is_wanted else json.dumps(text, ensure_ascii=False)


def _types_of_json(text: str) -> frozenset[str]:
    return _TYPES[type(json.loads(text, parse_constant=_refuse))]


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def argument_rules(tool: Tool, rule: str, tags: Tags, terminal: Terminal) -> list[str]:
    """Return the rule of this name for the parameters of one tool, and the rules that it uses. Parameters are
    in the schema's order; optional ones may be left out. A schema that names no parameters allows any."""

    def opening(name: str) -> str:
        first, *others = map(terminal, tags.behind_name)
        further = "".join(f" {tags.gap} {other}" for other in others)
        return f"{terminal(tags.name)} {name} {first}{further} {literal(tags.space)}"

    properties = tool.parameters.get("properties")
    if properties is None:
        return [f"{rule}: ({opening(_ANY_NAME)} text {tags.gap})*"]
    required = tool.parameters.get("required", [])
    parts, rules = [literal("")], []
    for i, (name, schema) in enumerate(properties.items()):
        parts.append(f"{rule}_{i}{'' if name in required else '?'}")
        value = _value_rule(tool, name, schema, tags, terminal)
        rules.append(f"{rule}_{i}: {opening(literal(name))} {value} {tags.gap}")
    return [f"{rule}: {' '.join(parts)}", *rules]


def text_rules(tags: Tags, terminal: Terminal) -> list[str]:
    """Return the rule ``text`` for a text and its end tag. A text can't contain what ends it, so what is read
    is what was enforced."""
    end = terminal(tags.end)
    is_lazy = end == literal(tags.end)  # a special token needs no such care: it is no text
    stops = "|".join(re.escape(stop).replace("/", r"\/").replace("\n", "n") for stop in tags.missing_ends)
    without = rf" & ~/(.|\n)*({stops})(.|\n)*/" if stops else ""
    return [rf"TEXT: /(.|\n)*/{without}", f"text{'[lazy]' if is_lazy else ''}: TEXT {end}"]


def _value_rule(tool: Tool, name: str, schema: Any, tags: Tags, terminal: Terminal) -> str:
    """Return the rule for a value and its end tag."""
    closing = f"{literal(tags.space)} {terminal(tags.end)}"
    if not _is_text(schema):
        whole = definitions(tool) | (schema if isinstance(schema, dict) else {})
        return f"%json {with_options(whole)} {closing}"
    if further := schema.keys() - _AS_TEXT:
        raise InvalidRequestError(
            f"parameter {name!r} of tool {tool.name!r}: {', '.join(sorted(further))} can't be enforced, "
            "as this model writes texts in calls without quotes: use tool_choice 'auto' without strict",
            param="tools",
        )
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is None:
        return "text"
    return "(" + " | ".join(literal(str(choice)) for choice in choices) + f") {closing}"


def _is_text(schema: Any) -> bool:
    """Return whether a value is a text. It is, if nothing is known of it."""
    return schema is None or (isinstance(schema, dict) and schema.get("type") == "string")
