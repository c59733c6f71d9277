"""Reads a single header of a request."""

from __future__ import annotations

from starlette.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the value of the first header with this name, which must be in lower case. None if there is
    none."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value, "latin-1")
    return None
