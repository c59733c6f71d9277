"""Finds out whose a key or token is: an API key, a token of the issuer, or the admin token."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from router.access.api_keys import ApiKey
from router.access.key_file import KeyFile
from router.access.role import Role, includes
from wire.errors import AdminTokenError, AuthenticationError, PermissionDeniedError, TwinfangError

if TYPE_CHECKING:  # its library is imported only if there is an issuer
    from router.access.tokens.bearer_tokens import BearerTokens

WRONG = "Incorrect API key provided. Ask this server's operator for a key, or whether yours is still valid."
ADMIN = ApiKey("admin:token", b"", role="configure")
"""Whoever has the admin token. Names of keys have no colon."""


@dataclass(frozen=True)
class Credentials:
    key_file: KeyFile | None = None
    tokens: BearerTokens | None = None
    """None: there is no issuer of tokens."""
    is_admin_token: Callable[[bytes], bool] | None = None
    """None: there is no admin token."""

    @property
    def are_needed(self) -> bool:
        """Whether requests for text need a key or token."""
        return self.key_file is not None or self.tokens is not None

    @property
    def give_roles(self) -> bool:
        """Whether somebody may use the admin API, as far as that is known at the start."""
        has_roles = self.key_file is not None and any(key.role for key in self.key_file.keys)
        return self.is_admin_token is not None or self.tokens is not None or has_roles

    async def client(self, scope: Scope) -> ApiKey | None:
        """Return whose a request is; None if it has neither key nor token. Raises
        :class:`AuthenticationError` for a wrong one."""
        presented = presented_in(scope)
        if not presented:
            return None
        if len(presented) > 1:
            raise AuthenticationError(WRONG)
        return await self._find(presented[0])

    async def operator(self, scope: Scope) -> ApiKey | None:
        """Return who calls the admin API or reads metrics, in the same way. The admin token counts too."""
        presented = presented_in(scope)
        is_admin = self.is_admin_token
        if len(presented) == 1 and is_admin is not None and is_admin(presented[0].encode("latin-1")):
            return ADMIN
        return await self.client(scope)

    async def operator_with(self, needed: Role, scope: Scope) -> ApiKey:
        """Return who sends a request that needs a role. Raises :class:`AdminTokenError` (401), and
        :class:`PermissionDeniedError` (403) for somebody whose role does not suffice."""
        try:
            key = await self.operator(scope)
        except AuthenticationError as error:
            raise AdminTokenError(f"this address needs the role {needed}: {error.message}") from error
        if key is None:
            raise AdminTokenError(
                f"this address needs the role {needed}: send Authorization: Bearer <token>, with the one in "
                "the router's --admin-token-file, or with an API key or a token of the issuer that has this "
                "role"
            )
        if not includes(key.role, needed):
            has = f"has the role {key.role}" if key.role else "has no role"
            raise PermissionDeniedError(
                f"this call needs the role {needed}, and {key.name!r} {has}: ask an operator for the role"
            )
        return key

    async def has_role(self, needed: Role, scope: Scope) -> bool:
        """Return whether somebody with that role sends a request that everybody may send."""
        try:
            await self.operator_with(needed, scope)
        except TwinfangError:
            return False
        return True

    async def _find(self, presented: str) -> ApiKey:
        key = None if self.key_file is None else self.key_file.keys.find(presented)
        if key is None and self.tokens is not None and self.tokens.looks_like_one(presented):
            key = await self.tokens.key_of(presented)
        if key is None:
            raise AuthenticationError(WRONG)
        return key


def has_secret(scope: Scope, secret: str) -> bool:
    """Return whether a request carries ``secret``, and nothing else."""
    presented = presented_in(scope)
    return len(presented) == 1 and hmac.compare_digest(presented[0].encode("latin-1"), secret.encode())


def presented_in(scope: Scope) -> list[str]:
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
