"""The decode service: reads h(N-1) and blocks, computes token N, decodes, and streams the answer.

All requests of a router go through one bidirectional call. The gRPC side runs on the event loop, the engine
on its own thread, NIXL on the transfer thread. They communicate only through posted events.

With the engine's role ``both`` the same service is the monolithic server: requests come without tickets
and no transfer layer is started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from decode_server.config import DecodeConfig
from decode_server.stream import RouterStream
from decode_server.submissions import Submissions, choices_of, last_outputs, refusal, scores
from engine.grammar.follower import Asker, Follower
from engine.request import Request
from engine.step_result import StepResult
from kv_transfer.engine_server import EngineServer
from kv_transfer.exchange import ExchangeListener, StateExchange
from kv_transfer.reads.transfer import TransferResult
from telemetry.server_spans import DecodeSpans
from telemetry.start_up import StartUp
from wire.errors import DeadlineError, InvalidRequestError, TwinfangError, UnavailableError
from wire.gathered import messages_in
from wire.messages.generation import (
    Cancel,
    RequestOutput,
    ServerStats,
    SetDraining,
    StepOutputs,
    Submit,
)
from wire.messages.handoff import AnyTicket, Ticket
from wire.rpc import DECODE_SERVICE, decode_stream_request, requested_id, stream_handler, tell_of_unreadable
from wire.server import DRAIN_POLL_S, DRAIN_S, GrpcServer

if TYPE_CHECKING:
    from telemetry.otel import Tracing

log = logging.getLogger(__name__)


class DecodeService(EngineServer, ExchangeListener):
    """Ties engine, state exchange and the routers' streams together."""

    def __init__(
        self,
        config: DecodeConfig,
        server: GrpcServer,
        *,
        incarnation: str,
        tracing: Tracing | None = None,
        start_up: StartUp,
    ) -> None:
        super().__init__(
            config,
            server,
            incarnation=incarnation,
            start_up=start_up,
            on_step=self._on_step,
            local_prefill=config.local_prefill,
        )
        self._spans = DecodeSpans(tracing)
        self._exchange: StateExchange | None = None
        if config.engine.role == "decode":
            self._exchange = StateExchange(
                self._host, server, self, config, incarnation=incarnation, lease_ttl_s=config.keep_ttl_s
            )
            start_up.ended("transfer")
        takes_tickets = self._exchange is not None
        self._submissions = Submissions(
            self._engine,
            takes_tickets=takes_tickets,
            needs_tickets=takes_tickets and not config.local_prefill,
        )
        self._is_stopping = False
        self._streams: dict[str, RouterStream] = {}  # by request id
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._open_streams: set[RouterStream] = set()
        self._preparations: dict[str, asyncio.Task[None]] = {}
        """Tasks of requests that wait for a handshake or a grammar, by request id."""
        server.add_service(DECODE_SERVICE, {"Stream": stream_handler(self.stream)})
        server.add_server_service(
            *(self.describe, self.stats, self.prefix_news, self.set_draining),
            *(self.tend_session, self.purge),
        )

    async def close(self) -> None:
        for stream in list(self._open_streams):
            stream.close()
        for preparation in list(self._preparations.values()):
            preparation.cancel()
        if self._exchange is None:
            await asyncio.to_thread(self._host.stop)
        else:
            await self._exchange.close()

    async def drain(self) -> None:
        """Moves all requests to other servers, waits until their states are read, and ends all calls."""
        self._is_stopping = True
        if await self._let_go():
            give_up = time.monotonic() + DRAIN_S
            while self._open_streams and time.monotonic() < give_up and await self._has_requests():
                await asyncio.sleep(DRAIN_POLL_S)
        for stream in list(self._open_streams):
            stream.close()
        await self._host.leave_group(DRAIN_S)

    async def set_draining(self, message: SetDraining) -> None:
        """Starts draining, or ends it if an operator takes the drain back.

        With ``lets_go`` all requests move to other servers; a further call moves the requests that came after
        the last call.
        """
        self._note_draining(message)
        for stream in self._open_streams:
            stream.tell(self._drain_news())
        if message.is_draining and message.lets_go:
            await self._let_go()

    async def _let_go(self) -> bool:
        """Ends all requests as ``moved``. Returns whether any request moves.

        If the state of a request was computed, its output has a ticket from which another server continues
        it. A server of both roles moves nothing, since no other server could read from it.
        """
        if self._exchange is None or not self._streams:
            return False
        log.info("%d requests move to other servers", len(self._streams))
        await self._host.ask(self._move_all)
        return True

    async def _has_requests(self) -> bool:
        """Whether there are requests here, or moved requests that other servers have not read yet."""
        exchange = self._exchange
        if self._streams or exchange is None:
            return bool(self._streams)
        return await self._host.ask(lambda: exchange.awaits_reader)

    # --- calls, on the event loop ----------------------------------------------------------------

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Serves one router until it goes away; then cancels all its requests."""
        stream = RouterStream()
        stream.tell(self._drain_news())  # draining may have begun or ended since the router's last call
        self._open_streams.add(stream)
        reader = asyncio.create_task(self._read(requests, stream, context))
        try:
            async for message in stream.messages():
                yield message
        finally:
            reader.cancel()
            self._open_streams.discard(stream)
            for request_id in stream.request_ids:
                self._cancel(request_id)

    async def _read(self, requests: AsyncIterator[bytes], stream: RouterStream, context: Any) -> None:
        try:
            async for data in requests:
                try:
                    messages = messages_in(data)
                except TwinfangError as error:
                    tell_of_unreadable("Stream", context, error)
                    continue
                for one in messages:
                    self._take(one, stream, context)
        finally:
            stream.close()

    def _take(self, data: bytes, stream: RouterStream, context: Any) -> None:
        try:
            message = decode_stream_request(data)
        except TwinfangError as error:
            tell_of_unreadable("Stream", context, error)
            if (request_id := requested_id(data, Submit)) is not None:  # or its sender would wait in vain
                stream.deliver([refusal(request_id, error)])
            return
        if isinstance(message, Submit):
            self._accept(message, stream)
        elif isinstance(message, Cancel):
            self._cancel(message.request_id)
        elif self._exchange is not None:
            for address in message.addresses:
                self._exchange.peers.connect_soon(address)

    def _accept(self, message: Submit, stream: RouterStream) -> None:
        choices = (message, *message.forked())
        for request_id in (choice.request_id for choice in choices):
            if request_id in self._streams:
                error = InvalidRequestError(f"request id {request_id!r} is in use; choose another")
                stream.deliver([refusal(message.request_id, error)])
                return
        for choice in choices:
            self._streams[choice.request_id] = stream
            stream.begin(choice.request_id, choice.handle)
            self._spans.received(choice)
        try:
            if self._is_stopping:
                raise UnavailableError("this decode server is about to stop and takes no more requests")
            request = self._submissions.request(message)
        except TwinfangError as error:
            self._refuse([choice.request_id for choice in choices], message.ticket, error)
            return
        if message.timeout_s is not None:
            for choice in choices:
                self._deadlines[choice.request_id] = asyncio.get_running_loop().call_later(
                    message.timeout_s, self._expire, choice.request_id, message.timeout_s
                )
        if self._exchange is not None and message.ticket is not None:
            self._exchange.expect(message.ticket)
        if message.params.grammar is None and self._knows(message.ticket):
            self._host.post(lambda: self._add(request))
        else:
            task = asyncio.create_task(self._add_when_ready(request, message))
            self._preparations[message.request_id] = task
            task.add_done_callback(lambda _: self._preparations.pop(message.request_id, None))

    def _knows(self, ticket: AnyTicket | None) -> bool:
        return self._exchange is None or ticket is None or self._exchange.knows(ticket)

    async def _add_when_ready(self, request: Request, message: Submit) -> None:
        """Adds a request to the engine after a handshake, after the grammar's first masks, or after both.

        A handshake is needed if the server that lends is unknown here or has restarted.
        """
        ticket, choices = message.ticket, choices_of(request)
        try:
            if message.params.grammar is not None:
                await self._follow(choices, message)
            if self._exchange is not None and ticket is not None and not self._exchange.knows(ticket):
                await self._exchange.peers.ensure(ticket)
        except TwinfangError as error:
            self._drop_followers(choices)
            self._refuse([choice.request_id for choice in choices], ticket, error)
        except Exception as error:
            log.exception("request %s could not be prepared", request.request_id)
            self._drop_followers(choices)
            fault = TwinfangError(f"the handshake or the grammar failed: {type(error).__name__}")
            self._refuse([choice.request_id for choice in choices], ticket, fault)
        except asyncio.CancelledError:
            self._drop_followers(choices)
            if ticket is not None:
                self._end_lease(ticket)
            self._deliver(RequestOutput(fork.request_id, (), finish_reason="moved") for fork in request.forks)
            raise
        else:
            gone = [fork for fork in request.forks if fork.request_id not in self._streams]
            self._drop_followers(gone)
            request.forks = [fork for fork in request.forks if fork not in gone]
            self._host.post(lambda: self._add(request))

    async def _follow(self, choices: list[Request], message: Submit) -> None:
        """Gives each choice a follower of the grammar, and waits for the followers' first masks."""
        grammar, thinking = message.params.grammar, message.params.thinking
        assert grammar is not None
        answer = message.token_ids[len(message.token_ids) - message.num_answered :]
        asker = Asker(message.client, message.cache_salt)
        followers = []
        for choice in choices:
            choice.follower = follower = self._engine.grammars.follow(grammar, answer, thinking, asker)
            followers.append(follower)
        for follower in followers:
            await asyncio.wrap_future(follower.opened)

    def _drop_followers(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if isinstance(request.follower, Follower):
                self._engine.grammars.drop(request.follower)

    def _refuse(self, request_ids: Iterable[str], ticket: AnyTicket | None, error: TwinfangError) -> None:
        if ticket is not None:
            self._end_lease(ticket)
        self._deliver([refusal(request_id, error) for request_id in request_ids])

    def _cancel(self, request_id: str) -> None:
        """Cancels a request whose client or router is gone. No further output is sent for this request."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.drop(request_id)
            self._forget(request_id)
            self._spans.cancelled(request_id)
            self._end(request_id)

    def _expire(self, request_id: str, timeout_s: float) -> None:
        """Ends a request whose client waits no longer. If the router could not cancel the request because its
        connection is broken, it gets this error when the connection works again."""
        message = f"the request was not finished within the {timeout_s:.3g} s that were left for it here"
        self._deliver([refusal(request_id, DeadlineError(message))])
        self._end(request_id)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        deadline = self._deadlines.pop(request_id, None)
        if deadline is not None:
            deadline.cancel()

    def _end(self, request_id: str) -> None:
        """Stops all work for a request."""
        preparation = self._preparations.get(request_id)
        if preparation is not None:
            preparation.cancel()
        self._host.post(lambda: self._cancel_in_engine(request_id))

    async def stats(self) -> ServerStats:
        stats = await self._host.ask((self._exchange or self._engine).stats)
        stats = replace(stats, num_routers=len(self._open_streams))
        if not self._is_draining:
            return stats
        return replace(stats, drain="draining" if await self._has_requests() else "drained")

    def _deliver_step(self, outputs: StepOutputs) -> None:
        """Sends the outputs of a step to the routers that they are for."""
        streams = list(map(self._streams.get, outputs.token_ids))
        for stream in {one for one in streams if one is not None}:
            tokens = zip(streams, outputs.token_ids.items(), strict=True)
            stream.deliver_tokens(dict(named for one, named in tokens if one is stream))
        if outputs.outputs:
            self._deliver(outputs.outputs)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Sends each output to its router; outputs of cancelled requests are dropped."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.deliver((output,))
            if output.finish_reason is not None:
                self._forget(output.request_id)
                self._spans.ended(output)

    def _deliver_with(self, output: RequestOutput | None, ticket: Ticket) -> None:
        """Sends the last output of a request with the ticket for its state."""
        if output is not None:
            self._deliver([replace(output, ticket=ticket)])

    def _end_lease(self, ticket: AnyTicket) -> None:
        if self._exchange is not None:
            self._exchange.decline(ticket)

    # --- events, on the engine's thread ----------------------------------------------------------

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except TwinfangError as error:
            self._host.answer(self._deliver, [refusal(one.request_id, error) for one in choices_of(request)])
            self._give_back(request)

    def _cancel_in_engine(self, request_id: str) -> None:
        request = self._engine.cancel(request_id)
        if request is None or request.num_computed > 0:
            return
        self._give_back(request)

    def _move_all(self) -> None:
        self._engine.move_all()
        if self._exchange is not None:  # posted here: later leases are followed after this has run
            self._host.answer(self._exchange.stop_following)

    def _give_back(self, request: Request) -> None:
        """Ends the lease of a request that will not read the leased memory any more."""
        if request.ticket is not None:
            self._host.answer(self._end_lease, request.ticket)

    def _on_step(self, result: StepResult) -> None:
        outputs, last = result.outputs, last_outputs(result) if self._exchange is not None else {}
        if last:  # they follow with their tickets
            others = tuple(one for one in outputs.outputs if last.get(one.request_id) is not one)
            outputs = replace(outputs, outputs=others)
        if outputs:
            self._host.answer(self._deliver_step, outputs)
        if self._exchange is not None:
            for request in result.to_transfer:
                self._exchange.read(request)
            for request_id in result.to_give_up:  # other requests need the memory
                self._exchange.end_lease(request_id)
            for request in result.kept:
                lend = self._exchange.lease if request.finish_reason == "moved" else self._exchange.keep
                lend(request, partial(self._deliver_with, last.get(request.request_id)))
        for request in result.prefilled:
            self._host.answer(self._deliver, [scores(request)])
            self._engine.release(request.request_id)

    def read_ended(self, request: Request, result: TransferResult, outputs: list[RequestOutput]) -> None:
        if result.error is not None:
            self._give_back(request)
        if outputs:
            self._host.answer(self._deliver, outputs)
