"""Refuses requests without an API key or token: 401."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

from router.access.api_keys import NOBODY, ApiKey
from router.access.credentials import Credentials
from wire.errors import AuthenticationError

ADMIN_PREFIX = "/admin/"
"""These paths need a role, which the admin API asks for by itself."""
NEEDED = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer "
    "auth (i.e. Authorization: Bearer YOUR_KEY), or in the header x-api-key."
)


class Authentication:
    """Finds out whose key a request has. It is asked before a byte of the request's body is read.

    All paths need a key except ``open_paths``, which are for probes and scrapers, and the paths of the admin
    API. So a path that is added to the router later needs a key, too.
    """

    def __init__(self, credentials: Credentials, open_paths: Collection[str]) -> None:
        self._credentials = credentials
        self._open_paths = open_paths

    async def key_of(self, scope: Scope) -> ApiKey:
        """Return the request's key, or :data:`NOBODY` if it needs none. Raises :class:`AuthenticationError`
        (401)."""
        if not self._credentials.are_needed or self._is_open(scope["path"]):
            return NOBODY
        key = await self._credentials.client(scope)
        if key is None:
            raise AuthenticationError(NEEDED)
        return key

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(ADMIN_PREFIX)
