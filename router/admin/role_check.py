"""Checks who calls the admin API, and whether their role suffices, before every route."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.audited import operator_with
from router.access.credentials import Credentials
from router.access.role import Role
from router.admin.audited_call import AuditedCall
from router.audit.audit_log import Audit
from router.http.openai_errors import error_response
from wire.errors import TwinfangError

PREFIX = "/admin/v1"

_OPERATE = (r"/requests/[^/]+/abort", r"/workers/[^/]+/drain", r"/workers/[^/]+/undrain")


def role_for(method: str, path: str) -> Role:
    """Return the role that a call needs. A call that is added later needs the highest until this function
    knows better."""
    if method in ("GET", "HEAD"):
        return "view"
    inner = path.removeprefix(PREFIX)
    if method == "POST" and any(re.fullmatch(pattern, inner) for pattern in _OPERATE):
        return "operate"
    return "configure"


class RoleCheck:
    """Pure ASGI: refuses everything under the prefix to those whose role does not suffice.

    It runs before every route, so that no route that is added later can lack the check, and the answer does
    not tell whether there is one.
    """

    def __init__(self, app: ASGIApp, credentials: Credentials, audit: Audit) -> None:
        self._app = app
        self._credentials = credentials
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not _is_under(PREFIX, scope["path"]):
            await self._app(scope, receive, send)
            return
        needed = role_for(scope.get("method", ""), scope["path"])
        try:
            operator = await operator_with(needed, self._credentials, self._audit, scope)
        except TwinfangError as error:
            response = error_response(error, scope)
            if error.http_status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        act = AuditedCall(self._audit, scope, operator, changes=needed != "view")
        try:
            await self._app(scope, receive, act.sending(send))
        finally:
            await act.end()


def _is_under(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")
