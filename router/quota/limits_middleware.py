"""Ends the reservation of every request."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.quota.quota import Reservation

RESERVATION = "reservation"
"""Where a request's state keeps its reservation."""


class LimitsMiddleware:
    """Pure ASGI: releases what a request has reserved and nobody has settled, for example because its client
    was gone before the answer began."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            reservation = scope.get("state", {}).pop(RESERVATION, None)
            if isinstance(reservation, Reservation):
                reservation.release()
