"""The router's end of the connection to one prefill server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from router.background import OnFatal
from router.fleet.links.server_connection import (
    LOOK_INTERVAL_S,
    RETRY_INTERVAL_S,
    MayConnect,
    require_nothing,
)
from router.fleet.links.server_link import AddedBy, ServerLink
from router.policies.location import NOWHERE, Location
from wire.errors import DeadlineError, TwinfangError, UnavailableError
from wire.messages.generation import PrefillReply, PrefillRequest
from wire.messages.handoff import Abandon, PartialTicket
from wire.repeated_lines import RepeatedLines
from wire.rpc import ABANDON, PREFILL, call, call_for_replies

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

ABANDON_TIMEOUT_S = 5.0


class PrefillClient(ServerLink):
    """Watches one prefill server and calls it.

    ``on_appear`` is called with the client when a server starts to answer, and when another incarnation
    answers.
    """

    def __init__(
        self,
        address: str,
        *,
        served_models: frozenset[str] | None = None,
        may_connect: MayConnect = require_nothing,
        probe_interval_s: float,
        added_by: AddedBy = "flag",
        location: Location = NOWHERE,
        on_appear: Callable[[PrefillClient], None],
    ) -> None:
        super().__init__(
            "prefill",
            address,
            served_models=served_models,
            may_connect=may_connect,
            probe_interval_s=probe_interval_s,
            added_by=added_by,
            location=location,
        )
        self._on_appear = on_appear
        self._probe_now = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def num_requests(self) -> int:
        return self.assignments.num_requests

    def start(self, on_fatal: OnFatal) -> None:
        self._keep(self._keep_watch(), f"watch of prefill server {self.address}", on_fatal)

    async def close(self) -> None:
        """Wait until the leases that no decode server will read have been given back, then close the
        connection."""
        await self._end_tasks()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._connection.close()

    async def prefill(
        self, request: PrefillRequest, *, timeout_s: float, on_started: Callable[[PartialTicket], None]
    ) -> PrefillReply:
        """Let the server compute the prompt. Raises the error that the server raised. Cancelling this call
        also cancels the work on the server.

        ``on_started`` is called at most once, with the early ticket of a prompt that takes a while.
        """
        try:
            return await self._prefill(request, timeout_s, on_started)
        except (asyncio.CancelledError, DeadlineError):
            self.abandon(request.request_id)  # the server's reply, and with it a lease, may be on the way
            raise
        except UnavailableError as error:
            self._lose(error.message)
            raise UnavailableError.told(
                "the prefill server could not be reached; send the request again",
                detail=f"the prefill server at {self.address} could not be reached: {error.message}",
            ) from error

    async def _prefill(
        self, request: PrefillRequest, timeout_s: float, on_started: Callable[[PartialTicket], None]
    ) -> PrefillReply:
        replies = call_for_replies(self._connection.channel, PREFILL, request, timeout_s=timeout_s)
        has_started = False
        async with aclosing(replies):
            async for reply in replies:
                self._connection.heard()
                if isinstance(reply, PrefillReply):
                    return reply
                if not has_started:
                    on_started(reply.ticket)
                has_started = True
        raise UnavailableError("Prefill ended without a reply")

    def abandon(self, request_id: str) -> None:
        """In the background, give back a lease whose blocks and state no server will read. If the message is
        lost, the lease expires."""
        task = asyncio.create_task(self._abandon(request_id))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _abandon(self, request_id: str) -> None:
        try:
            await call(self._connection.channel, ABANDON, Abandon(request_id), timeout_s=ABANDON_TIMEOUT_S)
        except TwinfangError as error:
            kind = f"prefill server {self.address} was not told of a request's end"
            lines.write(logging.WARNING, kind, "request %s: %s: %s", request_id, kind, error)

    async def _keep_watch(self) -> None:
        while True:
            num_wishes = self.drain.num_wishes
            connection = self._connection
            info = await (connection.describe() if self._info is None else connection.look())
            appeared = info is not None and (self._info is None or self._info.incarnation != info.incarnation)
            self._info = info
            if info is not None:
                self.drain.appeared(info, num_wishes=num_wishes)
                await self.drain.tell()
            if appeared and info is not None:
                self.assignments.appeared(info)
                log.info("prefill server %s is there", self.address)
                self._on_appear(self)
            self._probe_now.clear()
            pause_s = min(RETRY_INTERVAL_S if info is None else LOOK_INTERVAL_S, self._probe_interval_s)
            try:
                await asyncio.wait_for(self._probe_now.wait(), pause_s)
            except TimeoutError:
                continue
            await asyncio.sleep(min(0.1, self._probe_interval_s))  # do not flood a server that refuses calls

    def _lose(self, reason: str) -> None:
        self._info = None
        self._connection.failed(reason)
        self._probe_now.set()
