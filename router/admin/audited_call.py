"""Notes a call of the admin API in the audit log: one line, with what was before and after."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.types import Message, Scope, Send

from router.access.api_keys import ApiKey
from router.access.audited import call_of, origin_of
from router.audit.audit_log import Audit

_IN_STATE = "audited_change"


def note_change(request: Request, *, before: Any, after: Any) -> None:
    """Note what a call has changed. To be called before the answer begins."""
    request.scope["state"][_IN_STATE] = {"before": before, "after": after}


def note_attempt(request: Request, **asked: Any) -> None:
    """Note what a call asks for, so that its line tells of it if the call is refused. To be called before
    whatever can refuse it."""
    request.scope["state"][_IN_STATE] = {"asked": asked}


class AuditedCall:
    """One call that was let in. If it changes something, its line is written before the answer begins."""

    def __init__(self, audit: Audit, scope: Scope, operator: ApiKey, *, changes: bool) -> None:
        self._audit, self._scope, self._operator, self._changes = audit, scope, operator, changes
        self._is_noted = False

    def sending(self, send: Send) -> Send:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._note(message["status"])
            await send(message)

        return sent

    async def end(self) -> None:
        """Note a call that has ended without an answer."""
        await self._note(None)

    async def _note(self, status: int | None) -> None:
        if self._is_noted:
            return
        self._is_noted = True
        who, what = self._operator.name, call_of(self._scope)
        about: dict[str, Any] = {
            "role": self._operator.role,
            "from": origin_of(self._scope),
            "status": status,
        }
        if self._changes:
            change = self._scope["state"].get(_IN_STATE, {})
            self._audit.note("call", who=who, what=what, **about, **change)
            await self._audit.written()
        else:
            self._audit.viewed(who=who, what=what, **about)
