"""The router's end of one prefill server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing

from router.assignments import Assignments
from router.background import OnFatal, cancel_and_wait, start_background
from router.connection import LOOK_INTERVAL_S, RETRY_INTERVAL_S, Connection, MayConnect, require_nothing
from router.server_drain import ServerDrain
from router.worker_id import ROLES, AddedBy, PoolRole, worker_id
from wire.errors import DeadlineError, TwinfangError, UnavailableError
from wire.generation import PrefillReply, PrefillRequest, ServerInfo, ServerStats
from wire.handoff import Abandon, PartialTicket
from wire.prefixes import PrefixNews
from wire.repeated_lines import RepeatedLines
from wire.rpc import ABANDON, PREFILL, call, call_for_replies

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

ABANDON_TIMEOUT_S = 5.0


class PrefillClient:
    """Watches one prefill server and calls it.

    ``on_appear`` is called with the client when a server answers that was not there before, or
    another life of it (incarnation).
    """

    pool_role: PoolRole = "prefill"
    added_by: AddedBy = "flag"

    def __init__(
        self,
        address: str,
        *,
        served_models: frozenset[str] | None = None,
        may_connect: MayConnect = require_nothing,
        probe_interval_s: float,
        on_appear: Callable[[PrefillClient], None],
    ) -> None:
        self.address = address
        self.worker_id = worker_id(self.pool_role, address)
        self._info: ServerInfo | None = None
        """None as long as the server does not answer."""
        self.assignments = Assignments(time.monotonic)
        self._connection = Connection(address, ROLES[self.pool_role], served_models, may_connect=may_connect)
        self.drain = ServerDrain(self._connection)
        self._probe_interval_s = probe_interval_s
        self._on_appear = on_appear
        self._probe_now = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> ServerInfo | None:
        """None as long as the server can't be used."""
        return self._info if self._connection.is_usable else None

    @property
    def last_info(self) -> ServerInfo | None:
        """What it said last, whether or not it can be used now; None: nothing yet."""
        return self._connection.last_info

    @property
    def is_connected(self) -> bool:
        """Whether it has said who it is, used or not."""
        return self._info is not None

    @property
    def problem(self) -> str:
        return self._connection.problem

    def hold_back(self, why: str) -> None:
        """Sends nothing new there as long as there is a reason; an empty one ends that."""
        self._connection.held_back = why

    @property
    def num_requests(self) -> int:
        return self.assignments.num_requests

    def start(self, on_fatal: OnFatal) -> None:
        for watch in (self._keep_watch(), self._connection.keep_health(self._probe_interval_s)):
            self._watches.append(start_background(watch, f"watch of prefill server {self.address}", on_fatal))

    async def close(self) -> None:
        """Waits for leases that are being given back, since nobody else knows of them."""
        await cancel_and_wait(*self._watches)
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._connection.close()

    async def prefill(
        self, request: PrefillRequest, *, timeout_s: float, on_started: Callable[[PartialTicket], None]
    ) -> PrefillReply:
        """Runs the prompt. Raises what the server raised; cancelling cancels the call there.

        ``on_started`` gets the early ticket of a prompt that takes a while, at most once.
        """
        try:
            return await self._prefill(request, timeout_s, on_started)
        except (asyncio.CancelledError, DeadlineError):
            self.abandon(request.request_id)  # its answer, and with it a lease, may be on its way already
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

    async def stats(self) -> ServerStats | None:
        """The server's figures; None without a connection or an answer."""
        return None if self._info is None else await self._connection.stats()

    async def prefix_news(self, since: int | None) -> PrefixNews | None:
        """What its cache can serve; None without a connection or an answer."""
        return None if self._info is None else await self._connection.prefix_news(since)

    def abandon(self, request_id: str) -> None:
        """Gives back, in the background, what will not be read. Its time to live covers a lost message."""
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
            await asyncio.sleep(min(0.1, self._probe_interval_s))  # a server that refuses is not hammered

    def _lose(self, reason: str) -> None:
        self._info = None
        self._connection.failed(reason)
        self._probe_now.set()
