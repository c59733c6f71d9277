"""The way of every HTTP request to its endpoint: who may enter, and in which order.

All checks before an endpoint are here, in one coroutine. As ASGI middleware each of them would cost every
request a coroutine and a wrapper around ``send``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.authentication import Authentication
from router.access.client import note_client
from router.access.cross_site import HostCheck, OriginCheck
from router.http.bodies.body_limit import BoundedBody
from router.http.bodies.body_room import BodyRoom, BodyShare
from router.http.bodies.turn_lane import TurnLane
from router.http.client_end import client_end_of
from router.http.drain import Drain
from router.http.head import answer_head
from router.http.openai_errors import answer_error, answer_unexpected, error_response
from router.http.request_head import HEADER, request_id
from router.quota.quota import release_unsettled
from router.quota.rate_headers import ANTHROPIC_NAMES, OPENAI_NAMES
from wire.errors import AuthenticationError, TwinfangError

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Checks:
    """What is asked of a request before its body is read."""

    hosts: HostCheck
    origins: OriginCheck
    authentication: Authentication
    on_unauthorized: Callable[[Scope, TwinfangError], None]


class Entrance:
    """Lets requests in, counts them until they are answered, and calls their endpoint.

    ``endpoints`` are called without FastAPI's work for each call, which matches routes, resolves
    dependencies, opens exit stacks and has telemetry of its own. These endpoints read their body and make
    their response themselves. ``app`` has the same endpoints, in order to describe them and to refuse other
    methods; it also answers all other requests.

    Once the drain has begun, new requests get a 503 and each connection is closed after its next answer, so
    that clients and load balancers go elsewhere. Paths that begin with one of ``still_answered`` are answered
    as before, so that operators can watch the drain; the drain does not wait for these answers.

    A request is read, checked and sent to a server without a pause, until it waits for something. Two hundred
    requests that come at once take half a second of the loop's time. So only one request begins in each
    iteration of the event loop, and clients take turns: a probe does not have to wait for all of them. Paths
    in ``without_turn`` are answered at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        checks: Checks,
        *,
        drain: Drain,
        still_answered: tuple[str, ...],
        without_turn: frozenset[str],
        room: BodyRoom,
        max_body_bytes: int,
        cors_origins: tuple[str, ...],
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._checks = checks
        self._drain = drain
        self._still_answered = still_answered
        self._without_turn = without_turn
        self._beginnings = TurnLane()
        self._room = room
        self._max_body_bytes = max_body_bytes
        self._inside: ASGIApp = self._let_in
        if cors_origins:
            self._inside = CORSMiddleware(
                self._let_in,
                allow_origins=cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After", *OPENAI_NAMES, *ANTHROPIC_NAMES],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        state = scope.setdefault("state", {})
        own_id = request_id(scope)
        state["request_id"], state["arrived_s"] = own_id.decode(), time.monotonic()
        drain = None if scope["path"].startswith(self._still_answered) else self._drain

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (HEADER, own_id)]
                if drain is not None and drain.has_begun:
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        try:
            self._checks.hosts.refuse(scope)
            self._checks.origins.refuse(scope)
        except TwinfangError as error:
            await error_response(error, scope)(scope, receive, send_named)
            return
        if scope["method"] == "HEAD":
            await answer_head(self._inside, scope, receive, send_named)
        else:
            await self._inside(scope, receive, send_named)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a request from an allowed site, unless the router stops or an API key is missing."""
        is_counted = not scope["path"].startswith(self._still_answered)
        try:
            key = await self._checks.authentication.key_of(scope)
            if is_counted:
                self._drain.refuse()  # last: to check a token may take a while
            client = note_client(scope, key)
        except TwinfangError as error:
            response = error_response(error, scope)
            if isinstance(error, AuthenticationError):
                self._checks.on_unauthorized(scope, error)
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        self._drain.num_running += is_counted
        share = BodyShare(self._room, client.name)
        share.put_into(scope)
        try:
            if scope["path"] not in self._without_turn:
                await self._beginnings.begin(client.name)
            body = BoundedBody(scope, receive, share, self._max_body_bytes)
            await self._answer(scope, body.receive, send)
        finally:
            release_unsettled(scope)
            share.end()
            self._drain.num_running -= is_counted

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except TwinfangError as error:  # streams raise too, but only before they have begun
            await answer_error(request, error)(scope, receive, send)
        except Exception as error:
            if not client_end_of(scope).has_begun:
                await answer_unexpected(request, error)(scope, receive, send)
            raise  # the server logs the traceback


class RouterApp(FastAPI):
    """FastAPI's application behind an :class:`Entrance`, which has to be set before the first request."""

    entrance: Entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["app"] = self
            await self.entrance(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that was let in, by its route."""
        await super().__call__(scope, receive, send)
