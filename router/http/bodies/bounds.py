"""How large the fields of a request may be: one table of bounds, and the only code that checks requests
against this table.

Bounds that are not in the table depend on the model and the settings: a prompt's length on the model's
context (:mod:`router.models.prompt`), the number of choices on ``--max-choices``, a body's size on
``--max-body-size``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wire.errors import InvalidRequestError
from wire.messages.sampling_params import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS

CHARACTERS = "characters"


@dataclass(frozen=True)
class Bound:
    """The limit of one field. Values of types that can't be counted are ignored here, because types are
    checked later."""

    field: str
    """The path of the field: ``messages[].content`` is the content of each message."""
    limit: int
    unit: str
    """What is counted. :data:`CHARACTERS`: the characters of all strings and names inside the value, and one
    for any other value inside. Any other unit: the items of a list or an object."""
    remedy: str

    def check(self, value: Any, where: str) -> None:
        """Raise :class:`InvalidRequestError` if ``value``, found at ``where``, is too large."""
        size = num_chars_of(value) if self.unit == CHARACTERS else _num_items(value)
        if size > self.limit:
            raise InvalidRequestError(
                f"{where} has {size} {self.unit}, the limit is {self.limit}: {self.remedy}",
                param=None if self is FIELDS else where.partition("[")[0].partition(".")[0],
            )


_NAME = "send a shorter one"
_FEWER = "send fewer"
_GRAMMAR = "send a smaller one"
_CHAT = "shorten the conversation"

BOUNDS = (
    Bound("model", 512, CHARACTERS, _NAME),
    Bound("user", 1024, CHARACTERS, _NAME),
    Bound("cache_salt", 1024, CHARACTERS, _NAME),
    Bound("session_id", 256, CHARACTERS, _NAME),
    Bound("new_session_id", 256, CHARACTERS, _NAME),
    Bound("reasoning_effort", 64, CHARACTERS, _NAME),
    Bound("thinking", 1024, CHARACTERS, _GRAMMAR),
    Bound("stop", 64, "strings", _FEWER),
    Bound("stop[]", 1024, CHARACTERS, _NAME),
    Bound("stop_token_ids", MAX_STOP_TOKEN_IDS, "token ids", _FEWER),
    Bound("logit_bias", MAX_LOGIT_BIASES, "entries", _FEWER),
    Bound("stream_options", 16, "entries", _FEWER),
    Bound("response_format", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("structured_outputs", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("structured_outputs.choice", 1000, "strings", _FEWER),
    Bound("guided_json", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("guided_regex", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("guided_grammar", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("guided_choice", 1000, "strings", _FEWER),
    Bound("guided_choice", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("messages", 1 << 14, "messages", _CHAT),
    Bound("messages[].content", 1 << 12, "parts", "join parts that are text"),
    Bound("messages[].tool_calls", 512, "calls", _CHAT),
    Bound("messages[].tool_calls[].function.arguments", 1 << 20, CHARACTERS, _CHAT),
    Bound("tools", 512, "tools", _FEWER),
    Bound("tools", 1 << 20, CHARACTERS, "send fewer or smaller ones"),
    Bound("tool_choice", 1 << 16, CHARACTERS, _GRAMMAR),
    Bound("chat_template_kwargs", 1 << 16, CHARACTERS, _GRAMMAR),
    Bound("system", 1 << 12, "blocks", "join blocks that are text"),
    Bound("messages[].content[].content", 1 << 12, "blocks", "join blocks that are text"),
    Bound("messages[].content[].input", 1 << 20, CHARACTERS, _CHAT),
    Bound("stop_sequences", 64, "strings", _FEWER),
    Bound("stop_sequences[]", 1024, CHARACTERS, _NAME),
    Bound("metadata.user_id", 1024, CHARACTERS, _NAME),
    Bound("cache_control", 16, "entries", _FEWER),
    Bound("context_management", 1 << 12, CHARACTERS, _GRAMMAR),
    Bound("output_config", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("output_format", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("tokens", 1 << 20, "token ids", "divide them among several requests"),
    Bound("input", 1 << 14, "items", _CHAT),
    Bound("input[].content", 1 << 12, "parts", "join parts that are text"),
    Bound("input[].output", 1 << 12, "parts", "join parts that are text"),
    Bound("input[].summary", 1 << 12, "parts", "join parts that are text"),
    Bound("input[].arguments", 1 << 20, CHARACTERS, _CHAT),
    Bound("input[].id", 256, CHARACTERS, _NAME),
    Bound("input[].call_id", 256, CHARACTERS, _NAME),
    Bound("input[].name", 256, CHARACTERS, _NAME),
    Bound("text", MAX_GRAMMAR_BYTES, CHARACTERS, _GRAMMAR),
    Bound("reasoning", 256, CHARACTERS, _NAME),
    Bound("include", 64, "strings", _FEWER),
    Bound("include[]", 256, CHARACTERS, _NAME),
    Bound("metadata", 16, "entries", _FEWER),
    Bound("previous_response_id", 256, CHARACTERS, _NAME),
    Bound("prompt_cache_key", 1024, CHARACTERS, _NAME),
    Bound("prompt_cache_retention", 64, CHARACTERS, _NAME),
    Bound("safety_identifier", 1024, CHARACTERS, _NAME),
    Bound("service_tier", 64, CHARACTERS, _NAME),
)

FIELDS = Bound("the body", 256, "fields", "leave out those that are not in the API")
SESSION = Bound("the session's header", 1024, CHARACTERS, _NAME)


def check_bounds(body: Mapping[str, Any]) -> None:
    """Check the bounds of a parsed body of any endpoint. Raises :class:`InvalidRequestError`.

    To be called before types are checked, because the type check reports every wrong value, even if a list
    has a million of them.
    """
    FIELDS.check(body, "the body")
    for field in body.keys() & _BY_FIELD.keys():
        for bound, path in _BY_FIELD[field]:
            for where, value in _found(body[field], field, path):
                bound.check(value, where)


def _by_field() -> dict[str, list[tuple[Bound, tuple[str, ...]]]]:
    found: dict[str, list[tuple[Bound, tuple[str, ...]]]] = {}
    for bound in BOUNDS:
        field, *path = bound.field.replace("[]", ".[]").split(".")
        found.setdefault(field, []).append((bound, tuple(path)))
    return found


_BY_FIELD = _by_field()


def _found(value: Any, where: str, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield all values at ``path`` inside ``value``, with the path of each. There may be no such value."""
    if not path:
        yield where, value
    elif path[0] == "[]":
        if isinstance(value, str):  # a single string may stand for a list of one string
            yield from _found(value, where, path[1:])
        for i, item in enumerate(value if isinstance(value, list) else ()):
            yield from _found(item, f"{where}[{i}]", path[1:])
    elif isinstance(value, dict) and path[0] in value:
        yield from _found(value[path[0]], f"{where}.{path[0]}", path[1:])


def _num_items(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def num_chars_of(value: Any) -> int:
    """Count the characters of all strings and names inside ``value``, and one for any other value."""
    if isinstance(value, str):
        return len(value)
    num_chars, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            num_chars += sum(map(len, item))
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
        else:
            num_chars += len(item) if isinstance(item, str) else 1
    return num_chars


KEYWORDS = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


def add_bounds(schema: dict[str, Any]) -> None:
    """Add the bounds to ``schema``, a body's JSON schema that must not contain references."""
    for bound in (*BOUNDS, FIELDS):
        path = [] if bound is FIELDS else bound.field.replace("[]", ".[]").split(".")
        for place in _schemas_at(schema, path):
            _tell(place, bound)


def _tell(place: dict[str, Any], bound: Bound) -> None:
    is_of_any_type = "type" not in place and "anyOf" not in place
    kind = "string" if is_of_any_type else place.get("type")
    if kind in KEYWORDS and (kind == "string") == (bound.unit == CHARACTERS):
        place[KEYWORDS[kind]] = bound.limit


def _schemas_at(schema: dict[str, Any], path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the value at ``path``, one for each type that it may have."""
    for branch in (schema, *schema.get("anyOf", ())):
        if not path:
            yield branch
        elif path[0] != "[]":
            inner = branch.get("properties", {}).get(path[0])
            yield from () if inner is None else _schemas_at(inner, path[1:])
        elif branch.get("type") == "string":  # a single string may stand for a list of one string
            yield from _schemas_at(branch, path[1:])
        elif "items" in branch:
            yield from _schemas_at(branch["items"], path[1:])
