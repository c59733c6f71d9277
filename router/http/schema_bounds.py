"""The table of bounds in the JSON schema of a body, for those who make clients of ``/openapi.json``.

What no keyword of JSON Schema says is left out: the characters of all strings in a list or an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from router.http.bounds import BOUNDS, CHARACTERS, FIELDS, Bound

KEYWORDS = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


def add_bounds(schema: dict[str, Any]) -> None:
    """``schema`` is a body's, without references."""
    for bound in (*BOUNDS, FIELDS):
        path = [] if bound is FIELDS else bound.field.replace("[]", ".[]").split(".")
        for place in _found(schema, path):
            _tell(place, bound)


def _tell(place: dict[str, Any], bound: Bound) -> None:
    is_of_any_type = "type" not in place and "anyOf" not in place
    kind = "string" if is_of_any_type else place.get("type")
    if kind in KEYWORDS and (kind == "string") == (bound.unit == CHARACTERS):
        place[KEYWORDS[kind]] = bound.limit


def _found(schema: dict[str, Any], path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The schemas of what is at ``path``: of each type that it may have."""
    for branch in (schema, *schema.get("anyOf", ())):
        if not path:
            yield branch
        elif path[0] != "[]":
            inner = branch.get("properties", {}).get(path[0])
            yield from () if inner is None else _found(inner, path[1:])
        elif branch.get("type") == "string":  # where a list may be, a string stands for a list of it
            yield from _found(branch, path[1:])
        elif "items" in branch:
            yield from _found(branch["items"], path[1:])
