"""Refuses JSON that is small but very expensive to parse. The check is made before the JSON is parsed.

Eight megabytes of ``[],`` are 2.6 million lists: parsing them takes a quarter of a gigabyte and blocks the
event loop for seconds. Only characters outside of strings count, so long texts pass, whatever they contain.
"""

from __future__ import annotations

from wire.errors import InvalidRequestError

MAX_VALUES = 1_200_000
"""The maximum number of items in all lists and objects together. This many token ids of five digits fill a
body of the default ``--max-body-size``."""
MAX_PARTS = 1 << 18
"""The maximum number of lists, objects and names in objects together. They are the most expensive to
parse."""
MAX_DEPTH = 128
"""The maximum number of lists and objects that are nested within one another."""

_IRRELEVANT = bytes(set(range(256)) - set(b'"[]{}:,'))


def check_shape(data: bytes, *, what: str = "the body", param: str | None = None) -> None:
    """Raise :class:`InvalidRequestError` if JSON has too many or too deeply nested values.

    The check of a megabyte takes at most one millisecond if there are few brackets, commas, colons and quotes
    in it, otherwise at most ten milliseconds.
    """
    if _num_parts(data) <= MAX_DEPTH and data.count(b",") < MAX_VALUES:
        return
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    bare = bare.translate(None, _IRRELEVANT)
    _check(bare.count(b'"') // 2, "strings", MAX_VALUES + MAX_PARTS, what, param)
    bare = b"".join(bare.split(b'"')[::2])  # every second piece is inside a string
    _check(bare.count(b",") + 1, "values", MAX_VALUES, what, param)
    _check(_num_parts(bare), "lists, objects and names", MAX_PARTS, what, param)
    if (depth := _depth(bare)) > MAX_DEPTH:
        raise InvalidRequestError(
            f"{what} has {depth} lists and objects within one another, the limit is {MAX_DEPTH}: "
            "nest them less deeply",
            param=param,
        )


def _num_parts(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{") + data.count(b":")


def _depth(bare: bytes) -> int:
    depth = deepest = 0
    for byte in bare.translate(None, b":,"):
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def _check(number: int, unit: str, limit: int, what: str, param: str | None) -> None:
    if number > limit:
        raise InvalidRequestError(
            f"{what} holds {number} {unit}, the limit is {limit}: divide it among several requests",
            param=param,
        )
