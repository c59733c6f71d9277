"""Each HTTP request has an id, which its answer returns in ``X-Request-Id``."""

from __future__ import annotations

import re
import secrets

from starlette.types import Scope

HEADER = b"x-request-id"
ACCEPTED = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
"""Ids appear in logs, headers and messages. A client's id is only used if it can do no harm there."""


def request_id(scope: Scope) -> bytes:
    """Return the client's ``X-Request-Id``, or a new id."""
    for name, value in scope["headers"]:
        if name == HEADER:
            return value if ACCEPTED.fullmatch(value) else _new_id()
    return _new_id()


def _new_id() -> bytes:
    return secrets.token_hex(16).encode()
