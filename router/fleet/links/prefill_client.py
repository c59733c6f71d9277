"""The router's end of the connection to one prefill server: a bidirectional stream that carries all
prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from router.fleet.links.kept_stream import KeptStream
from router.fleet.links.server_connection import MayConnect, require_nothing
from router.fleet.links.server_link import RESTARTED, AddedBy, ServerLink
from router.policies.location import NOWHERE, Location
from wire.channels import Channels
from wire.codec import encode
from wire.errors import TwinfangError, UnavailableError, error_from_code
from wire.gathered import messages_in
from wire.messages.generation import (
    Cancel,
    DrainNews,
    PrefillNews,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    ServerInfo,
)
from wire.messages.handoff import Abandon, PartialTicket
from wire.repeated_lines import RepeatedLines
from wire.rpc import ABANDON, PREFILL_PATH, call, decode_prefill_reply, open_channel, read_long

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

ABANDON_TIMEOUT_S = 5.0


class PrefillReceiver(Protocol):
    """Gets what a server says of one prompt. It is called on the event loop between the news of other
    prompts, so its methods must neither wait nor raise."""

    def prefill_started(self, ticket: PartialTicket) -> None:
        """Take the early ticket of a prompt that takes a while. Called at most once."""

    def prefilled(self, reply: PrefillReply) -> None:
        """Take the reply. No call follows."""

    def prefill_failed(self, error: TwinfangError) -> None:
        """Take the server's error, or that the server was lost. No call follows."""


class PrefillClient(ServerLink):
    """Sends prompts to one prefill server, and gives what it says of each to the prompt's receiver.

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
        channels: Channels = open_channel,
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
            channels=channels,
        )
        self._stream = KeptStream(
            self._connection, self.drain, self, path=PREFILL_PATH, probe_interval_s=probe_interval_s
        )
        self._on_appear = on_appear
        self._receivers: dict[str, PrefillReceiver] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def num_requests(self) -> int:
        return self.assignments.num_requests

    async def close(self) -> None:
        """Wait until the leases that no decode server will read have been given back, then close the
        connection."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        await super().close()

    def submit(self, request: PrefillRequest, receiver: PrefillReceiver) -> None:
        """Let the server compute a prompt. Raises :class:`UnavailableError` if there is no stream."""
        if self.info is None:
            raise UnavailableError(f"the prefill server at {self.address} is not connected: {self.problem}")
        self._receivers[request.request_id] = receiver
        self._stream.send(encode(request))

    def cancel(self, request_id: str) -> None:
        """Deliver nothing more for this prompt, and end the work on the server."""
        if self._receivers.pop(request_id, None) is not None:
            self._stream.send(encode(Cancel(request_id)))
            self.abandon(request_id)  # the server's reply, and with it a lease, may be on the way

    def abandon(self, request_id: str) -> None:
        """In the background, give back a lease whose blocks and state no server will read. If the message is
        lost, the lease expires."""
        task = asyncio.create_task(self._abandon(request_id))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def opened(self, info: ServerInfo) -> None:
        self.assignments.appeared(info)
        self._on_appear(self)

    async def received(self, data: bytes, info: ServerInfo) -> str:
        for one in messages_in(data):
            news = await read_long(decode_prefill_reply, one)
            if not isinstance(news, DrainNews):
                self._deliver(news)
            elif news.incarnation == info.incarnation:
                self.drain.heard(news.is_draining)
            else:  # the old process had not taken the call, so gRPC itself sent the call to the new one
                return RESTARTED
        return ""

    def lost(self) -> None:
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.prefill_failed(
                UnavailableError.told(
                    "the prefill server could not be reached; send the request again",
                    detail=f"the prefill server at {self.address} could not be reached: {self.problem}",
                )
            )

    def _deliver(self, told: PrefillNews) -> None:
        """Give news to its receiver. A prompt without a receiver was cancelled while it was on the way."""
        receiver, news = self._receivers.get(told.request_id), told.news
        if receiver is None:
            return
        if isinstance(news, PrefillStarted):
            receiver.prefill_started(news.ticket)
            return
        del self._receivers[told.request_id]
        if isinstance(news, PrefillReply):
            receiver.prefilled(news)
        else:
            receiver.prefill_failed(error_from_code(news.code, news.message))

    async def _abandon(self, request_id: str) -> None:
        try:
            await call(self._connection.channel, ABANDON, Abandon(request_id), timeout_s=ABANDON_TIMEOUT_S)
        except TwinfangError as error:
            kind = f"prefill server {self.address} was not told of a request's end"
            lines.write(logging.WARNING, kind, "request %s: %s: %s", request_id, kind, error)
