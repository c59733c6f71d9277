"""The router's end of the connection to one decode server: a bidirectional stream that carries all
requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Protocol

from router.fleet.links.kept_stream import KeptStream
from router.fleet.links.server_connection import MayConnect, require_nothing
from router.fleet.links.server_link import RESTARTED, AddedBy, ServerLink
from router.policies.location import NOWHERE, Location
from wire.channels import Channels
from wire.codec import encode
from wire.errors import TwinfangError, UnavailableError
from wire.messages.generation import (
    Cancel,
    ConnectPeers,
    DrainNews,
    RequestOutput,
    ServerInfo,
    StepNews,
    Submit,
)
from wire.rpc import STREAM_PATH, decode_stream_reply, open_channel, read_long

TakeTokens = Callable[[tuple[int, ...], float], None]
"""Like :meth:`Receiver.take_tokens`."""


NO_FORKS: Mapping[str, Receiver] = {}


class Receiver(Protocol):
    """Gets the outputs of one request. It is called on the event loop between the outputs of other requests,
    so its methods must neither wait nor raise."""

    def take(self, output: RequestOutput | TwinfangError) -> None:
        """Take an output or an error. No call follows after an error or after an output with a finish
        reason."""

    def take_tokens(self, token_ids: tuple[int, ...], now_s: float) -> None:
        """Take an output that has tokens and nothing else, which came at ``now_s`` on the monotonic clock.
        Nearly all outputs are of this kind."""


class DecodeStream(ServerLink):
    """Gives every output of one decode server to the receiver of its request.

    ``prefill_addresses`` returns the prefill servers to which a newly connected decode server should connect.
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
        prefill_addresses: Callable[[ServerInfo], Iterable[str]],
    ) -> None:
        super().__init__(
            "decode",
            address,
            served_models=served_models,
            may_connect=may_connect,
            probe_interval_s=probe_interval_s,
            added_by=added_by,
            location=location,
            channels=channels,
        )
        self._stream = KeptStream(
            self._connection, self.drain, self, path=STREAM_PATH, probe_interval_s=probe_interval_s
        )
        self._prefill_addresses = prefill_addresses
        self._receivers: dict[str, tuple[Receiver, int]] = {}
        """Each request's receiver and handle."""
        self._tokens_to: dict[int, TakeTokens] = {}
        """Where outputs go that are only tokens, by handle: to the receiver, unless it has diverted them."""
        self._handles = count(1)

    @property
    def num_requests(self) -> int:
        return len(self._receivers)

    def new_handle(self) -> int:
        """Return a number for a further request."""
        return next(self._handles)

    def submit(self, request: Submit, receiver: Receiver, forks: Mapping[str, Receiver] = NO_FORKS) -> None:
        """Send a request; its outputs go to ``receiver``, and those of its forks to ``forks``, by request id.
        The request and its forks have handles from :meth:`new_handle`.

        Raises :class:`UnavailableError` if there is no stream.
        """
        if self.info is None:
            raise UnavailableError(f"the decode server at {self.address} is not connected: {self.problem}")
        self._take(request.request_id, request.handle, receiver)
        for fork in request.forks:
            self._take(fork.request_id, fork.handle, forks[fork.request_id])
        self._stream.send(encode(request))

    def divert(self, request_id: str, take_tokens: TakeTokens) -> None:
        """Give this request's outputs that are only tokens to ``take_tokens`` from now on."""
        if (found := self._receivers.get(request_id)) is not None:
            self._tokens_to[found[1]] = take_tokens

    def cancel(self, request_id: str) -> None:
        """Deliver nothing more for this request, and tell the server to forget it."""
        if (found := self._receivers.pop(request_id, None)) is not None:
            del self._tokens_to[found[1]]
            self._stream.send(encode(Cancel(request_id)))

    def give_up(self) -> None:
        """Let all requests continue on other servers. This server is told to forget them, in case it still
        receives messages."""
        for request_id in self._receivers:
            self._stream.send(encode(Cancel(request_id)))
        self._fail_all("the decode server does not answer; send the request again", "its engine hangs")

    def connect_peers(self, addresses: Iterable[str]) -> None:
        """Ask the server to connect to prefill servers before a request needs them."""
        message = ConnectPeers(tuple(addresses))
        info = self._stream.info
        if info is not None and info.role == "decode" and message.addresses:
            self._stream.send(encode(message))

    def opened(self, info: ServerInfo) -> None:
        self.assignments.appeared(info)
        self.connect_peers(self._prefill_addresses(info))

    async def received(self, data: bytes, info: ServerInfo) -> str:
        news = await read_long(decode_stream_reply, data)
        if not isinstance(news, DrainNews):
            self._deliver(news)
        elif news.incarnation == info.incarnation:
            self.drain.heard(news.is_draining)
        else:  # the old process had not taken the call, so gRPC itself sent the call to the new one
            return RESTARTED
        return ""

    def lost(self) -> None:
        self._fail_all(
            "the decode server was lost while it answered; send the request again",
            f"the connection was lost while it answered: {self.problem}",
        )

    def _take(self, request_id: str, handle: int, receiver: Receiver) -> None:
        self._receivers[request_id] = (receiver, handle)
        self._tokens_to[handle] = receiver.take_tokens

    def _deliver(self, news: StepNews) -> None:
        """Give outputs to their receivers. A request without a receiver was cancelled while its output was on
        the way."""
        now_s, tokens_to = time.monotonic(), self._tokens_to
        for handle, token_ids in news.plain():
            if (take := tokens_to.get(handle)) is not None:
                take(token_ids, now_s)
        for output in news.outputs:
            if (found := self._receivers.get(output.request_id)) is not None:
                receiver, handle = found
                if output.finish_reason is not None:
                    del self._receivers[output.request_id], tokens_to[handle]
                receiver.take(output)

    def _fail_all(self, told: str, why: str) -> None:
        detail = f"the decode server at {self.address}: {why}"
        receivers, self._receivers = self._receivers, {}
        self._tokens_to.clear()
        for receiver, _ in receivers.values():
            receiver.take(UnavailableError.told(told, detail=detail))
