"""What the router reads from the head of every request: single headers, and the request's id."""

from __future__ import annotations

import re
import secrets

from starlette.types import Scope

HEADER = b"x-request-id"
"""The answer returns the id in the same header."""
ACCEPTED = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
"""Ids appear in logs, headers and messages. A client's id is only used if it can do no harm there."""


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the value of the first header with this name, which must be in lower case. None if there is
    none."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value, "latin-1")
    return None


def request_id(scope: Scope) -> bytes:
    """Return the client's ``X-Request-Id``, or a new id."""
    for name, value in scope["headers"]:
        if name == HEADER:
            return value if ACCEPTED.fullmatch(value) else _new_id()
    return _new_id()


def _new_id() -> bytes:
    return secrets.token_hex(16).encode()
