"""Lets people in, and notes in the audit log who was refused."""

from __future__ import annotations

from starlette.types import Scope

from router.access.api_keys import ApiKey
from router.access.credentials import Credentials
from router.access.role import Role
from router.audit.audit_log import Audit
from wire.errors import PermissionDeniedError, TwinfangError


async def operator_with(needed: Role, credentials: Credentials, audit: Audit, scope: Scope) -> ApiKey:
    """Do the same as :meth:`Credentials.operator_with`, and note a refusal."""
    try:
        return await credentials.operator_with(needed, scope)
    except TwinfangError as error:
        note_refusal(audit, scope, error)
        raise


def note_refusal(audit: Audit, scope: Scope, error: TwinfangError) -> None:
    """Note that a request was not let in. What it has presented is not noted."""
    is_known = isinstance(error, PermissionDeniedError)
    origin = origin_of(scope)
    kind = f"{origin} {error.message if is_known else error.code}"
    told = {"from": origin, "what": call_of(scope), "why": error.message}
    audit.refused(kind, is_known=is_known, **told)


def call_of(scope: Scope) -> str:
    """Return method and path. The query is left out."""
    return f"{scope.get('method', '')} {scope['path']}"


def origin_of(scope: Scope) -> str:
    """Return the address that a request came from."""
    peer = scope.get("client")
    return str(peer[0]) if peer else ""
