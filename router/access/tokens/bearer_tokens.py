"""Bearer tokens: JSON Web Tokens (RFC 7519) that an OpenID Connect issuer has signed.

Signatures are checked by PyJWT. A token that was checked is remembered until it expires or the issuer's keys
change, so that a client's further requests cost no signature.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jwt
from jwt.exceptions import (
    DecodeError,
    ExpiredSignatureError,
    ImmatureSignatureError,
    InvalidAudienceError,
    InvalidIssuedAtError,
    InvalidIssuerError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)

from router.access.api_keys import ApiKey
from router.access.tokens.claims import key_of_claims
from router.access.tokens.issuer_keys import IssuerKeys
from router.access.tokens.public_keys import ALGORITHMS, PublicKeys
from router.config import TokenIssuer
from router.http.openai_errors import shown
from wire.errors import AuthenticationError

MAX_TOKEN_BYTES = 8192
MAX_REMEMBERED = 4096
LEEWAY_S = 30
"""How far the clocks of the issuer and of this machine may differ."""
REQUIRED = ("exp", "iss", "aud")
SIGNED_BY_PUBLIC_KEY = sorted({name for names in ALGORITHMS.values() for name in names})


class BearerTokens:
    """Finds out whose a token is."""

    def __init__(self, issuer: TokenIssuer, keys: IssuerKeys, now: Callable[[], float] = time.time) -> None:
        self._issuer, self.keys, self._now = issuer, keys, now
        self._remembered: OrderedDict[bytes, tuple[ApiKey, float]] = OrderedDict()
        """By a token's digest: its key, and when it expires."""
        self._of_keys: PublicKeys | None = None
        """The issuer's keys that the remembered tokens were checked with."""

    @staticmethod
    def looks_like_one(presented: str) -> bool:
        return presented.count(".") == 2

    async def key_of(self, token: str) -> ApiKey:
        """Return the key of a token. Raises :class:`AuthenticationError`, or :class:`UnavailableError` if the
        issuer's keys could not be read yet."""
        if len(token) > MAX_TOKEN_BYTES:
            raise AuthenticationError(
                f"the bearer token has {len(token)} bytes, the limit is {MAX_TOKEN_BYTES}: ask the issuer "
                "for one with fewer claims"
            )
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        return self._recall(digest) or await self._check(token, digest)

    def _recall(self, digest: bytes) -> ApiKey | None:
        if self._of_keys is not self.keys.known:
            self._remembered.clear()
            self._of_keys = self.keys.known
        key, expires_s = self._remembered.get(digest, (None, 0.0))
        return key if self._now() < expires_s else None

    async def _check(self, token: str, digest: bytes) -> ApiKey:
        try:
            claims = await self._claims_of(token)
        except PyJWTError as error:
            raise AuthenticationError(self._refusal(error)) from error
        key = key_of_claims(claims, self._issuer)
        self._recall(digest)  # the issuer's keys may be new
        self._remembered[digest] = key, int(claims["exp"]) + LEEWAY_S
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return key

    async def _claims_of(self, token: str) -> dict[str, Any]:
        """Return the claims of a token that is valid. Raises what PyJWT raises, and what :meth:`key_of`
        raises."""
        header = jwt.get_unverified_header(token)
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in SIGNED_BY_PUBLIC_KEY:
            raise AuthenticationError(
                f"the token says that it is signed by {shown(algorithm)}: expected one of "
                f"{', '.join(SIGNED_BY_PUBLIC_KEY)}, with a key of the issuer"
            )
        key = await self.keys.find(kid)
        if key is None or algorithm not in key.algorithms:
            named = "no key" if kid is None else f"the key {shown(kid)}"
            raise AuthenticationError(
                f"the token names {named} for {algorithm}, and the issuer {self._issuer.issuer} has no such "
                "key: ask it for a new token"
            )
        return jwt.decode(
            token,
            key.for_algorithm(algorithm),
            algorithms=[algorithm],
            audience=self._issuer.audience,
            issuer=self._issuer.issuer,
            leeway=LEEWAY_S,
            options={"require": list(REQUIRED), "enforce_minimum_key_length": True},
        )

    def _refusal(self, error: PyJWTError) -> str:
        issuer = self._issuer
        match error:
            case ExpiredSignatureError():
                return "the token has expired: ask the issuer for a new one"
            case ImmatureSignatureError() | InvalidIssuedAtError():
                return "the token is not valid yet: wait, or compare the clocks of the issuer and this router"
            case InvalidAudienceError():
                return f"the token is for another audience: ask the issuer for one for {issuer.audience!r}"
            case InvalidIssuerError():
                return f"the token is of another issuer: get one from {issuer.issuer}"
            case MissingRequiredClaimError():
                return f"the token has no claim {error.claim!r}: {', '.join(REQUIRED)} are needed"
            case InvalidSignatureError():
                return f"the token's signature is not by a key of {issuer.issuer}: ask it for a new token"
            case DecodeError():
                return "the token can't be read: send it as the issuer has given it"
            case _:
                return f"the token can't be used ({type(error).__name__}): ask the issuer for a new one"
