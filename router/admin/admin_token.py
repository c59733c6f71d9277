"""The admin token, and the check of every request for a token that only some may know."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.audited import note_refusal
from router.audit.audit_log import Audit
from router.http.openai_errors import error_response
from wire.errors import AdminTokenError, ConfigError

MIN_CHARS = 16
HASHED = re.compile(r"sha256:([0-9a-f]{64})")


class AdminToken:
    """Keeps only the token's SHA-256, and compares digests in constant time."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    @classmethod
    def of(cls, token: str) -> AdminToken:
        return cls(hashlib.sha256(token.encode()).digest())

    @classmethod
    def from_file(cls, path: Path) -> AdminToken:
        """Read ``path``, which holds the token, or ``sha256:`` and the token's hexadecimal digest.

        Raises :class:`ConfigError` if there is no token, or one that could be guessed.
        """
        try:
            text = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the admin token can't be read from {path}: {error}") from error
        if hashed := HASHED.fullmatch(text):
            return cls(bytes.fromhex(hashed[1]))
        if len(text) < MIN_CHARS or len(text.split()) != 1:
            raise ConfigError(
                f"the admin token in {path} has {len(text)} characters: it must be one word of at least "
                f"{MIN_CHARS}, made for example with `openssl rand -hex 32`"
            )
        return cls.of(text)

    def matches(self, given: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha256(given).digest(), self._digest)


class SecretCheck:
    """Pure ASGI: refuses everything under ``prefix`` without ``Authorization: Bearer <token>``.

    It runs before every route, so that no route that is added later can lack the check. ``where`` says where
    callers find the token.
    """

    def __init__(self, app: ASGIApp, token: AdminToken, prefix: str, where: str, audit: Audit) -> None:
        self._app = app
        self._token = token
        self._prefix = prefix
        self._where = where
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._covers(scope["path"]) and not self._allows(scope):
            error = AdminTokenError(
                f"this address needs a secret: send Authorization: Bearer <token>, {self._where}"
            )
            note_refusal(self._audit, scope, error)
            response = error_response(error, scope)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _covers(self, path: str) -> bool:
        return path == self._prefix or path.startswith(self._prefix + "/")

    def _allows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and self._token.matches(token.strip())
