"""Calls that are written as JSON: ``{"name": …, "arguments": {…}}``. Arguments are passed on as they are
written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from router.models.grammar import literal, with_options
from router.models.tools.arriving_text import ArrivingText, Reading, UnreadableError
from router.models.tools.part_writer import MAX_NAME_CHARS, PartWriter
from router.models.tools.tool_format import Tool

ARGUMENTS = ("arguments", "parameters")
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_CLOSING = {"{": "}", "[": "]"}


class JsonEnd:
    """Finds the end of an object or a list in text that arrives piece by piece."""

    def __init__(self) -> None:
        self._expected: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self.is_broken = False
        """Whether the value ended at a bracket that fits none before it."""

    def find(self, text: str) -> tuple[int, bool]:
        """Look at the next piece. Return how many of its characters belong to the value, and whether the
        value has ended with them."""
        at = 0
        if self._is_escaped and text:
            at, self._is_escaped = 1, False
        while match := (_IN_STRING if self._is_in_string else _STRUCTURE).search(text, at):
            at, found = match.end(), match[0]
            if found == "\\":
                self._is_escaped = at == len(text)
                at += 1
            elif found == '"':
                self._is_in_string = not self._is_in_string
            elif found in _CLOSING:
                self._expected.append(_CLOSING[found])
            elif found != self._expected.pop():
                self.is_broken = True
                return match.start(), True
            if not self._expected:
                return at, True
        return len(text), False


def object_begins(text: ArrivingText) -> Reading[None]:
    """Skip blanks up to an object. Raises :class:`UnreadableError` if something else follows."""
    yield from text.skip_blanks()
    if (yield from text.peek()) != "{":
        raise UnreadableError


def json_object(text: ArrivingText, tell: Callable[[str], None]) -> Reading[None]:
    """Read an object and pass it on as it arrives."""
    end, has_ended = JsonEnd(), False
    while not has_ended:
        length, has_ended = end.find(text.rest)
        tell(text.take(length))
        if not has_ended:
            yield
    if end.is_broken:
        raise UnreadableError


def json_string(text: ArrivingText, most: int | None = None) -> Reading[str]:
    """Read a string of at most ``most`` characters."""
    raw = [(yield from text.require('"'))]
    length = 0
    while True:
        raw.append((yield from text.before(('"', "\\"), None if most is None else most - length)))
        length += len(raw[-1]) + 2
        raw.append((yield from text.require('"', "\\")))
        if raw[-1] == '"':
            break
        yield from text.peek()
        raw.append(text.take(1))
    try:
        said: str = json.loads("".join(raw), strict=False)
        said.encode()  # half a surrogate pair is no text
    except ValueError as error:
        raise UnreadableError from error
    return said


def json_call(text: ArrivingText, calls: PartWriter, new_id: Callable[[], str] = str) -> Reading[None]:
    """Read one call. It begins as soon as its name is known and its arguments begin. ``new_id`` makes its
    id."""
    name, held, has_begun, has_arguments = "", list[str](), False, False

    def tell(arguments: str) -> None:
        nonlocal has_begun
        if not has_begun:
            calls.begin(name, new_id())
            has_begun = True
        calls.add(arguments)

    yield from text.require("{")
    yield from text.skip_blanks()
    while not (yield from text.accept("}")):
        key = yield from json_string(text, MAX_NAME_CHARS)
        yield from text.skip_blanks()
        yield from text.require(":")
        yield from text.skip_blanks()
        if key not in ARGUMENTS:
            said = yield from json_string(text, MAX_NAME_CHARS)
            if key == "name" and not name:
                name = said
                if held:
                    tell("".join(held))
        elif has_arguments:
            raise UnreadableError
        else:
            yield from _arguments(text, tell if name else held.append)
            has_arguments = True
        yield from text.skip_blanks()
        if (yield from text.accept(",")):
            yield from text.skip_blanks()
    if not has_begun:
        tell("{}")
    text.settle()


def json_list(text: ArrivingText, calls: PartWriter, new_id: Callable[[], str] = str) -> Reading[None]:
    """Read a list of calls."""
    yield from text.require("[")
    yield from text.skip_blanks()
    while not (yield from text.accept("]")):
        yield from json_call(text, calls, new_id)
        yield from text.skip_blanks()
        if (yield from text.accept(",")):
            yield from text.skip_blanks()


def call_rules(tools: Sequence[Tool], key: str = "arguments", further: str = "") -> list[str]:
    """Return the rule ``one``, for the object of one call, and the rules that it uses. ``further`` stands for
    further members of the object."""
    rules = [f"one: {' | '.join(f'tool{i}' for i in range(len(tools)))}", *argument_rules(tools)]
    for i, tool in enumerate(tools):
        opening = literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ')
        rules.append(f"tool{i}: {opening} arguments{i} {further} {literal('}')}")
    return rules


def argument_rules(tools: Sequence[Tool]) -> list[str]:
    """Return the rules for the arguments of each tool. These are separate rules, since a schema may refer to
    itself."""
    return [f"arguments{i}: %json {with_options(tool.parameters)}" for i, tool in enumerate(tools)]


def _arguments(text: ArrivingText, tell: Callable[[str], None]) -> Reading[None]:
    """Read an object. Some models write it as JSON in a string, or null if it is empty."""
    first = yield from text.peek()
    if first == "n":
        yield from text.require("null")
        tell("{}")
    elif first == '"':
        said = (yield from json_string(text)).strip() or "{}"
        try:
            is_object = isinstance(json.loads(said), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise UnreadableError
        tell(said)
    else:
        yield from object_begins(text)
        yield from json_object(text, tell)
