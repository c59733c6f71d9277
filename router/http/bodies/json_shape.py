"""Refuses JSON whose parsing costs far more than its bytes, before it is parsed.

Eight megabytes of ``[],`` are 2.6 million lists: a quarter of a gigabyte and seconds in which the event loop
stands still. What counts is outside of strings; long texts, whatever is in them, pass.
"""

from __future__ import annotations

from wire.errors import InvalidRequestError

MAX_VALUES = 1_200_000
"""Items of lists and objects. So many token ids of five digits fill the default ``--max-body-size``."""
MAX_PARTS = 1 << 18
"""Lists, objects and names in objects: those cost most."""
MAX_DEPTH = 128
"""Lists and objects within one another."""

_IRRELEVANT = bytes(set(range(256)) - set(b'"[]{}:,'))


def check_shape(data: bytes, *, what: str = "the body", param: str | None = None) -> None:
    """Raises :class:`InvalidRequestError` for JSON of too many or too deeply nested values.

    A megabyte takes a millisecond or less where few of the characters that count are in it, ten otherwise.
    """
    if _num_parts(data) <= MAX_DEPTH and data.count(b",") < MAX_VALUES:
        return
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    bare = bare.translate(None, _IRRELEVANT)
    _check(bare.count(b'"') // 2, "strings", MAX_VALUES + MAX_PARTS, what, param)
    bare = b"".join(bare.split(b'"')[::2])  # every second piece is a string's
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
