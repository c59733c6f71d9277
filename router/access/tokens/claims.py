"""Turns the claims of a verified token into the key that the router knows its requests by.

A claim that is there and can't be used refuses the token: a limit that was mistyped must not be no limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from router.access.api_keys import ApiKey
from router.access.key_file import LIMITS, PRIORITIES
from router.access.key_limits import LIMIT_NAMES, KeyLimits
from router.access.role import Role, highest
from router.config import TokenIssuer
from router.http.openai_errors import shown
from wire.errors import AuthenticationError

TENANT = re.compile(r"[!-~]{1,255}")
"""Visible ASCII, as long as OpenID Connect allows a subject to be."""
TENANT_PREFIX = "tenant:"
"""Before a tenant's name. Names of API keys have no colon, so that no tenant has the name of a key."""


def key_of_claims(claims: Mapping[str, Any], issuer: TokenIssuer) -> ApiKey:
    """Return the key that the claims describe. Raises :class:`AuthenticationError`."""
    tenant = claim(claims, issuer.tenant_claim)
    if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
        raise AuthenticationError(
            f"the token's claim {issuer.tenant_claim!r} must name the tenant, with 1 to 255 visible ASCII "
            f"characters and no space, got {shown(tenant)}: ask the issuer for another token"
        )
    return ApiKey(
        TENANT_PREFIX + tenant,
        b"",
        _min_priority(claim(claims, issuer.priority_claim), issuer.priority_claim),
        _limits(claim(claims, issuer.limits_claim), issuer.limits_claim),
        _role(claim(claims, issuer.role_claim)),
    )


def claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return the claim of that name; None if there is none. If no claim has exactly this name, dots lead into
    objects: ``realm_access.roles``."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _min_priority(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value not in PRIORITIES:
        raise AuthenticationError(
            f"the token's claim {name!r} must be an integer from {PRIORITIES[0]} to {PRIORITIES[-1]}, got "
            f"{shown(value)}"
        )
    return value


def _limits(value: Any, name: str) -> KeyLimits | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value.keys() <= set(LIMIT_NAMES):
        raise AuthenticationError(
            f"the token's claim {name!r} must be an object with limits ({', '.join(LIMIT_NAMES)}), got "
            f"{shown(value)}"
        )
    for limit, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int) or number not in LIMITS:
            raise AuthenticationError(
                f"{limit} in the token's claim {name!r} must be an integer from {LIMITS[0]} to {LIMITS[-1]}, "
                f"got {shown(number)}"
            )
    return KeyLimits(**value) if value else None


def _role(value: Any) -> Role | None:
    names = value.split() if isinstance(value, str) else value if isinstance(value, list) else ()
    return highest({name for name in names if isinstance(name, str)})
