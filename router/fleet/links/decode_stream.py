"""The router's end of the connection to one decode server: a bidirectional stream that carries all
requests."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio

from router.background import OnFatal, cancel_and_wait
from router.fleet.links.server_connection import (
    LOOK_INTERVAL_S,
    RETRY_INTERVAL_S,
    MayConnect,
    require_nothing,
)
from router.fleet.links.server_link import AddedBy, ServerLink
from router.policies.location import NOWHERE, Location
from wire.codec import encode
from wire.errors import TwinfangError, UnavailableError
from wire.messages.generation import (
    Cancel,
    ConnectPeers,
    DrainNews,
    RequestOutput,
    ServerInfo,
    StepOutputs,
    Submit,
)
from wire.rpc import STREAM_PATH, decode_stream_reply, read_long


class Receiver(Protocol):
    """Gets the outputs of one request. It is called on the event loop between the outputs of other requests,
    so its methods must neither wait nor raise."""

    def take(self, output: RequestOutput | TwinfangError) -> None:
        """Take an output or an error. No call follows after an error or after an output with a finish
        reason."""

    def take_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Take an output that has tokens and nothing else. Nearly all outputs are of this kind."""


log = logging.getLogger(__name__)


class DecodeStream(ServerLink):
    """Keeps the stream to one decode server open, and gives every output to the receiver of its request.

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
        )
        self._max_backoff_s = min(RETRY_INTERVAL_S, probe_interval_s)
        self._look_interval_s = min(LOOK_INTERVAL_S, probe_interval_s)
        self._prefill_addresses = prefill_addresses
        self._receivers: dict[str, Receiver] = {}
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()

    @property
    def num_requests(self) -> int:
        return len(self._receivers)

    def start(self, on_fatal: OnFatal) -> None:
        self._keep(self._stay_connected(), f"stream to decode server {self.address}", on_fatal)

    async def close(self) -> None:
        await self._end_tasks()
        await self._connection.close()

    def submit(
        self, request: Submit, receiver: Receiver, forks: Mapping[str, Receiver] | None = None
    ) -> None:
        """Send a request; its outputs go to ``receiver``, and those of its forks to ``forks``, by request id.

        Raises :class:`UnavailableError` if there is no stream.
        """
        if self.info is None:
            raise UnavailableError(f"the decode server at {self.address} is not connected: {self.problem}")
        self._receivers |= {request.request_id: receiver, **(forks or {})}
        self._outgoing.put_nowait(encode(request))

    def cancel(self, request_id: str) -> None:
        """Deliver nothing more for this request, and tell the server to forget it."""
        if self._receivers.pop(request_id, None) is not None and self._info is not None:
            self._outgoing.put_nowait(encode(Cancel(request_id)))

    def give_up(self) -> None:
        """Let all requests continue on other servers. This server is told to forget them, in case it still
        receives messages."""
        for request_id in self._receivers:
            self._outgoing.put_nowait(encode(Cancel(request_id)))
        self._fail_all("the decode server does not answer; send the request again", "its engine hangs")

    def connect_peers(self, addresses: Iterable[str]) -> None:
        """Ask the server to connect to prefill servers before a request needs them."""
        message = ConnectPeers(tuple(addresses))
        if self._info is not None and self._info.role == "decode" and message.addresses:
            self._outgoing.put_nowait(encode(message))

    async def _stay_connected(self) -> None:
        backoff_s = 0.05
        while True:
            num_wishes = self.drain.num_wishes
            info = await self._connection.describe()
            if info is not None:
                backoff_s = 0.05
                self.drain.appeared(info, num_wishes=num_wishes)
                await self.drain.tell()
                await self._serve(info)
            await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    async def _serve(self, info: ServerInfo) -> None:
        """Serve requests from the stream's opening to its end."""
        stream: Any = self._connection.channel.stream_stream(STREAM_PATH)()
        self._outgoing = asyncio.Queue()
        self.assignments.appeared(info)
        self._info, self._is_silent = info, False
        log.info("connected to %s server %s", info.role, self.address)
        self.connect_peers(self._prefill_addresses(info))
        helpers = [asyncio.create_task(one) for one in (self._write(stream), self._keep_looking())]
        try:
            self._connection.failed(await self._read(stream, info))
        except grpc.aio.AioRpcError as error:
            self._connection.failed(f"the stream broke: {error.code().name}: {error.details()}")
        except TwinfangError as error:
            self._connection.failed(f"it sent a message that can't be read: {error.message}")
        finally:
            self._info = None
            stream.cancel()
            await cancel_and_wait(*helpers)
            self._fail_all(
                "the decode server was lost while it answered; send the request again",
                f"the connection was lost while it answered: {self.problem}",
            )

    async def _read(self, stream: Any, info: ServerInfo) -> str:
        """Read outputs until the stream can't be used any longer. Return the reason."""
        while (data := await stream.read()) is not grpc.aio.EOF:
            self._heard()
            news = await read_long(decode_stream_reply, data)
            if not isinstance(news, DrainNews):
                self._deliver(news)
            elif news.incarnation == info.incarnation:
                self.drain.heard(news.is_draining)
            else:  # the old process had not taken the call, so gRPC itself sent the call to the new one
                return "it was restarted while this router connected to it"
        return "it ended the stream"

    def _heard(self) -> None:
        """Note that the server has sent something. A server that was silent can be used again at once,
        because requests that failed while it was frozen are tried again now."""
        self._connection.heard()
        if self._is_silent:
            self._is_silent = False
            self._connection.succeeded()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._look_interval_s)
            self._is_silent = await self._connection.look() is None

    async def _write(self, stream: Any) -> None:
        try:
            while True:
                await stream.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("stream to %s: no more writing: %s", self.address, error)  # the reader sees it too

    def _deliver(self, news: StepOutputs) -> None:
        """Give outputs to their receivers. A request without a receiver was cancelled while its output was on
        the way."""
        for request_id, token_ids in news.token_ids.items():
            if (receiver := self._receivers.get(request_id)) is not None:
                receiver.take_tokens(token_ids)
        for output in news.outputs:
            if (receiver := self._receivers.get(output.request_id)) is not None:
                if output.finish_reason is not None:
                    del self._receivers[output.request_id]
                receiver.take(output)

    def _fail_all(self, told: str, why: str) -> None:
        detail = f"the decode server at {self.address}: {why}"
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.take(UnavailableError.told(told, detail=detail))
