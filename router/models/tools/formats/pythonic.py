"""A list of calls in Python, and nothing else in the answer. The format of Llama 3.2 and 4, among others.

[look(at="sky", days=[1, 2]), wait()]

Values become JSON as they arrive.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

from router.models.grammar import literal, with_options
from router.models.tools.arriving_text import ArrivingText, Reading, UnreadableError
from router.models.tools.part_writer import MAX_NAME_CHARS, PartWriter
from router.models.tools.tool_format import Terminal, Tool, definitions

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_KEPT = {*'"\\bfnrt'}
"""Characters that mean the same behind a backslash in JSON."""
_HEX = re.compile("[0-9a-fA-F]+")
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_MAX_DEPTH = 64


class Pythonic:
    begins: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    first_of_call = "["

    def read(self, text: ArrivingText, calls: PartWriter, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.skip_blanks()
        if (yield from text.accept("<|python_start|>")):
            yield from text.skip_blanks()
        yield from text.require("[")
        yield from text.skip_blanks()
        while True:
            yield from _call(text, calls)
            yield from text.skip_blanks()
            if (yield from text.require(",", "]")) == "]":
                break
            yield from text.skip_blanks()
        text.settle()
        yield from text.accept("<|python_end|>")

    def rules(self, tools: Sequence[Tool], terminal: Terminal, *, may_repeat: bool) -> list[str]:
        """The values are JSON. Python's own words for true, false and null can't be enforced by a schema, and
        the reader knows both."""
        calls = f"one ({literal(', ')} one)*" if may_repeat else "one"
        rules = [f"calls: {literal('[')} {calls} {literal(']')}"]
        rules.append(f"one: {' | '.join(f'tool{i}' for i in range(len(tools)))}")
        for i, tool in enumerate(tools):
            rules += _rules_of(tool, f"tool{i}")
        return rules


def _call(text: ArrivingText, calls: PartWriter) -> Reading[None]:
    """Read one call. It begins when the name of an argument follows, or no argument."""
    name = yield from text.word(MAX_NAME_CHARS)
    yield from text.require("(")
    yield from text.skip_blanks()
    opening = "{"
    while not (yield from text.accept(")")):
        key = yield from text.word(MAX_NAME_CHARS)
        yield from text.skip_blanks()
        yield from text.require("=")
        if opening == "{":
            calls.begin(name)
        calls.add(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        yield from _value(text, calls)
        yield from text.skip_blanks()
        if (yield from text.accept(",")):
            yield from text.skip_blanks()
    if opening == "{":
        calls.begin(name)
        calls.add("{")
    calls.add("}")


def _value(text: ArrivingText, calls: PartWriter) -> Reading[None]:
    """Read a text, a number, a word, or brackets with values in them."""
    expected: list[str] = []
    separator = ""
    while True:
        yield from text.skip_blanks()
        first = yield from text.peek()
        if first in _CLOSING and len(expected) < _MAX_DEPTH:
            text.take(1)
            expected.append(_CLOSING[first])
            calls.add(separator + ("{" if first == "{" else "["))
            separator = ""
            continue
        if not expected or first != expected[-1]:
            calls.add(separator)
            yield from (_string(text, calls) if first in "\"'" else _word(text, calls))
        separator = ""
        while expected and not separator:
            yield from text.skip_blanks()
            mark = yield from text.require(",", ":", expected[-1])
            if mark == expected[-1]:
                expected.pop()
                calls.add("}" if mark == "}" else "]")
            else:
                separator = f"{mark} "
        if not expected:
            return


def _word(text: ArrivingText, calls: PartWriter) -> Reading[None]:
    word = yield from text.word(MAX_NAME_CHARS)
    if word not in _WORDS and not _NUMBER.fullmatch(word):
        raise UnreadableError
    calls.add(_WORDS.get(word, word))


def _string(text: ArrivingText, calls: PartWriter) -> Reading[None]:
    quote = text.take(1)
    if (yield from text.accept(quote * 2)):
        quote *= 3
    elif (yield from text.accept(quote)):
        calls.add('""')
        return
    calls.add('"')
    while True:
        said, is_over = text.upto((quote, "\\"))
        calls.add(json.dumps(said, ensure_ascii=False)[1:-1])
        if not is_over:
            yield
        elif (yield from text.accept(quote)):
            calls.add('"')
            return
        else:
            text.take(1)
            calls.add((yield from _escaped(text)))


def _escaped(text: ArrivingText) -> Reading[str]:
    """Read what stands behind a backslash. Return its JSON. Of Python's escapes, those for single bytes and
    names of characters are left as they are."""
    character = yield from text.peek()
    text.take(1)
    if character in _KEPT:
        return f"\\{character}"
    if character in "'\n":
        return character.strip()
    if character not in _NUM_DIGITS:
        return json.dumps(f"\\{character}", ensure_ascii=False)[1:-1]
    digits = ""
    while len(digits) < _NUM_DIGITS[character]:
        yield from text.peek()
        digits += text.take(1)
    number = int(digits, 16) if _HEX.fullmatch(digits) else sys.maxunicode + 1
    if number > sys.maxunicode:
        raise UnreadableError
    return f"\\u{number:04x}" if number < 0x10000 else chr(number)


def _rules_of(tool: Tool, rule: str) -> list[str]:
    """Return the rules for one tool. Arguments are in the schema's order; optional ones may be left out. The
    rule ``first`` stands for the arguments from one on if none was written before, ``next`` if one was."""
    name = literal(f"{tool.name}(")
    properties = tool.parameters.get("properties")
    if properties is None:
        any_value = f"{rule}_any: /[a-zA-Z_]\\w*/ {literal('=')} %json {{}}"
        return [f"{rule}: {name} ({rule}_any ({literal(', ')} {rule}_any)*)? {literal(')')}", any_value]
    required = tool.parameters.get("required", [])
    rules = [f"{rule}: {name} {rule}_first0 {literal(')')}"]
    for i, (key, schema) in enumerate(properties.items()):
        whole = definitions(tool) | (schema if isinstance(schema, dict) else {})
        rules.append(f"{rule}_{i}: {literal(f'{key}=')} %json {with_options(whole)}")
        for kind, before in (("first", ""), ("next", literal(", "))):
            skipped = "" if key in required else f" | {rule}_{kind}{i + 1}"
            rules.append(f"{rule}_{kind}{i}: {before} {rule}_{i} {rule}_next{i + 1}{skipped}")
    return [*rules, *(f"{rule}_{kind}{len(properties)}: {literal('')}" for kind in ("first", "next"))]
