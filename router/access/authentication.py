"""Refuses requests without an API key: 401."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

from router.access.api_keys import NOBODY, ApiKey
from router.access.key_file import KeyFile
from wire.errors import AuthenticationError

ADMIN_PREFIX = "/admin/"
"""These paths need the admin token instead of an API key."""
NEEDED = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer "
    "auth (i.e. Authorization: Bearer YOUR_KEY), or in the header x-api-key."
)
WRONG = "Incorrect API key provided. Ask this server's operator for a key, or whether yours is still valid."


class Authentication:
    """Finds out whose key a request has. It is asked before a byte of the request's body is read.

    All paths need a key except ``open_paths``, which are for probes and scrapers, and the paths of the admin
    API. So a path that is added to the router later needs a key, too.
    """

    def __init__(self, key_file: KeyFile | None, open_paths: Collection[str]) -> None:
        """``key_file``: None if no request needs a key."""
        self._key_file = key_file
        self._open_paths = open_paths

    def key_of(self, scope: Scope) -> ApiKey:
        """Return the request's key, or :data:`NOBODY` if it needs none. Raises :class:`AuthenticationError`
        (401)."""
        if self._key_file is None or self._is_open(scope["path"]):
            return NOBODY
        presented = _presented(scope)
        if not presented:
            raise AuthenticationError(NEEDED)
        key = self._key_file.keys.find(presented[0]) if len(presented) == 1 else None
        if key is None:
            raise AuthenticationError(WRONG)
        return key

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(ADMIN_PREFIX)


def _presented(scope: Scope) -> list[str]:
    """Return the keys in a request's headers. Clients of OpenAI's API use ``Authorization``, many clients of
    Anthropic's ``x-api-key``. Some send both; then ``Authorization`` counts."""
    bearer, plain = [], []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            bearer += [key.strip()] if scheme.lower() == "bearer" else []
        elif name == b"x-api-key":
            plain.append(value.decode("latin-1").strip())
    return [key for key in bearer if key] or [key for key in plain if key]
