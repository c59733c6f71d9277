"""``response_format`` and vLLM's fields for the same purpose: the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from router.http.bodies.json_shape import check_shape
from router.http.openai_errors import shown
from router.models import grammar
from router.models.grammar_checker import OwnGrammars
from wire.errors import InvalidRequestError


class StructuredFields(BaseModel):
    """At most one of these fields may ask for a form."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


@dataclass(frozen=True)
class Structure:
    """The form that an answer must have, and the request's field that asked for it."""

    param: str
    grammar: str
    schema: dict[str, Any] | None = None
    """The schema, if the form is JSON."""
    is_text: bool = False
    """Whether the grammar is Lark or GBNF, as the client wrote it."""


async def wanted_structure(fields: StructuredFields, grammars: OwnGrammars) -> Structure | None:
    """Return the checked form of the answer. None if any text will do. Raises :class:`InvalidRequestError`
    that names the field."""
    asked = [
        structure
        for name, read in _READERS.items()
        if (value := getattr(fields, name)) is not None and (structure := read(value, name)) is not None
    ]
    if len(asked) > 1:
        names = " and ".join(structure.param for structure in asked)
        raise InvalidRequestError(f"{names} can't both be followed: give one of them", param=asked[1].param)
    for structure in asked:
        checked = await grammars.check(structure.grammar, param=structure.param, is_text=structure.is_text)
        return replace(structure, grammar=checked)
    return None


def _response_format(value: dict[str, Any], param: str) -> Structure | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _json(grammar.ANY_OBJECT, param)
    if kind != "json_schema":
        raise _wrong(param, f"type must be 'text', 'json_object' or 'json_schema', got {shown(kind)}")
    said = value.get("json_schema")
    if not isinstance(said, dict) or "schema" not in said:
        raise _wrong(param, f"json_schema must be an object with a schema, got {shown(said)}")
    return _json(said["schema"], param)


def _structured_outputs(value: dict[str, Any], param: str) -> Structure | None:
    """Read vLLM's field: an object with one of the keys of ``_KINDS``. Its other keys must be null or
    false."""
    given = {key: said for key, said in value.items() if said is not None and said is not False}
    if not given:
        return None
    if len(given) > 1 or next(iter(given)) not in _KINDS:
        raise _wrong(param, f"must have just one of {', '.join(_KINDS)}, got {shown(sorted(given))}")
    kind, said = given.popitem()
    return _KINDS[kind](said, param)


def _json_object(value: Any, param: str) -> Structure:
    return _json(grammar.ANY_OBJECT, param)


def _json(value: Any, param: str) -> Structure:
    if isinstance(value, str):
        check_shape(value.encode(), what=param, param=param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(param, f"the schema is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _wrong(param, f"the schema must be an object, got {shown(value)}")
    return Structure(param, grammar.of_schema(value), value)


def _regex(value: Any, param: str) -> Structure:
    if not isinstance(value, str) or not value:
        raise _wrong(param, f"the regular expression must be a string that is not empty, got {shown(value)}")
    return Structure(param, grammar.of_regex(value))


def _choice(value: Any, param: str) -> Structure:
    if not isinstance(value, list) or not value:
        raise _wrong(param, f"choices must be a list of at least 1 string, got {shown(value)}")
    if not all(isinstance(choice, str) and choice for choice in value):
        raise _wrong(param, f"choices must be strings that are not empty, got {shown(value)}")
    return Structure(param, grammar.of_choice(value))


def _grammar(value: Any, param: str) -> Structure:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(param, f"the grammar must be a string that is not empty, got {shown(value)}")
    return Structure(param, value, is_text=True)


_KINDS: dict[str, Callable[[Any, str], Structure]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READERS: dict[str, Callable[[Any, str], Structure | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}


def _wrong(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {message}", param=param)
