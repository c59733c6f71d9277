"""Refuses requests without an API key: 401, in OpenAI's form."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.api_keys import ApiKey
from router.access.key_file import KeyFile
from router.openai_errors import error_response
from router.probe_paths import PROBE_PATHS
from router.sibling_metrics import PATH_OF_ONE
from wire.errors import AuthenticationError

OPEN_PATHS = frozenset({*PROBE_PATHS, PATH_OF_ONE})
"""For probes and scrapers, which have no keys."""
ADMIN_PREFIX = "/admin/"
"""Has a token of its own."""
NEEDED = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer "
    "auth (i.e. Authorization: Bearer YOUR_KEY)."
)
WRONG = "Incorrect API key provided. Ask whoever runs this server for one, or whether yours still holds."


class AuthenticationMiddleware:
    """Pure ASGI: the key that a request has comes as ``scope["state"]["api_key"]``.

    It says no before a byte of the body is read. All paths need a key but those named above, so a new one
    does as well.
    """

    def __init__(self, app: ASGIApp, *, key_file: KeyFile) -> None:
        self._app = app
        self._key_file = key_file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            key = self._key_of(scope)
        except AuthenticationError as error:
            scope["app"].state.services.metrics.unauthorized.inc()
            response = error_response(error)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key"] = key
        await self._app(scope, receive, send)

    def _key_of(self, scope: Scope) -> ApiKey:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, presented = given[0].decode("latin-1").partition(" ") if given else ("", "", "")
        if scheme.lower() != "bearer" or not presented.strip():
            raise AuthenticationError(NEEDED)
        key = self._key_file.keys.find(presented.strip()) if len(given) == 1 else None
        if key is None:
            raise AuthenticationError(WRONG)
        return key


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(ADMIN_PREFIX)
