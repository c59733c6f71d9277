"""A long list of JSON values as the bytes that it will be sent as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson


class JsonList:
    """Grows by pieces, each written as it comes, so that the whole is only copied at the end.

    An answer may have a million log-probabilities: to write them in one go would hold up the event loop, and
    as objects they take twice the memory.
    """

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, values: Sequence[Any]) -> None:
        if values:
            self._pieces.append(orjson.dumps(values)[1:-1])

    def extend(self, later: JsonList) -> None:
        self._pieces += later._pieces

    @property
    def json(self) -> orjson.Fragment:
        return orjson.Fragment(b"[" + b",".join(self._pieces) + b"]")
