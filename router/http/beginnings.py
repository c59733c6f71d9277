"""Requests begin one after the other, so that the event loop does other things between any two."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.client import client_of
from router.http.turn_lane import TurnLane


class BeginningsMiddleware:
    """Pure ASGI: lets one POST begin in an iteration of the event loop, clients in turns.

    What a request has to do until it waits for something, it does in one go: it is read, checked and sent to
    a server. Two hundred that come at once take the loop half a second. Probes don't wait for that.
    """

    def __init__(self, app: ASGIApp, *, lane: TurnLane) -> None:
        self._app = app
        self._lane = lane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            async with self._lane.turn(client_of(HTTPConnection(scope)).name):
                pass  # it goes on until it has to wait; the next one's turn is in the next iteration
        await self._app(scope, receive, send)
