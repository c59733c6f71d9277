"""The prefill service: computes all tokens of a prompt except the last one, and leases the result.

The gRPC side runs on the event loop, the engine on its own thread. A call waits for the answers of the
engine's thread: for a prompt of several chunks an early ticket after the first chunk, then the reply with the
whole ticket. However the call ends, the lease ends exactly once: when the decode server has read the state,
when the router gives the lease back, when the call is cancelled, when the prompt loses its memory, or when
its time to live is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.request import Request
from engine.step_result import StepResult
from kv_transfer.engine_server import EngineServer
from kv_transfer.exchange import ExchangeListener, StateExchange
from kv_transfer.leases.source import EndedLease
from kv_transfer.reads.transfer import TransferResult
from kv_transfer.starts.neighbour_store import NeighbourStore
from prefill_server.config import PrefillConfig
from prefill_server.stream import RouterStreams
from telemetry.server_spans import PrefillSpans
from telemetry.start_up import StartUp
from wire.errors import InvalidRequestError, TransferError, TwinfangError, error_from_code
from wire.messages.generation import (
    Empty,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    RequestOutput,
    ServerStats,
    SetDraining,
)
from wire.messages.handoff import Abandon, Ticket
from wire.repeated_lines import RepeatedLines
from wire.rpc import ABANDON, PREFILL_SERVICE, stream_handler, unary_handler
from wire.server import DRAIN_POLL_S, DRAIN_S, GrpcServer

if TYPE_CHECKING:
    from telemetry.otel import Tracing

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

Answer = PrefillStarted | PrefillReply


class PrefillService(EngineServer, ExchangeListener):
    """Ties engine, state exchange and gRPC together."""

    def __init__(
        self,
        config: PrefillConfig,
        server: GrpcServer,
        *,
        incarnation: str,
        tracing: Tracing | None = None,
        start_up: StartUp,
    ) -> None:
        neighbours = NeighbourStore()
        super().__init__(
            *(config, server),
            incarnation=incarnation,
            start_up=start_up,
            on_step=self._on_step,
            neighbours=neighbours,
        )
        self._tracing = tracing
        self._exchange = StateExchange(
            *(self._host, server, self, config),
            incarnation=incarnation,
            lease_ttl_s=config.lease_ttl_s,
            neighbours=neighbours,
        )
        start_up.ended("transfer")
        self._calls: dict[str, asyncio.Queue[Answer | TwinfangError]] = {}
        self._streams = RouterStreams(self.prefill, self._drain_news)
        server.add_service(
            PREFILL_SERVICE,
            {
                "Stream": stream_handler(self._streams.handle),
                ABANDON.name: unary_handler(ABANDON, self.abandon),
            },
        )
        server.add_server_service(
            *(self.describe, self.stats, self.prefix_news, self.set_draining),
            *(self.tend_session, self.purge),
        )

    async def close(self) -> None:
        self._streams.close()
        await self._exchange.close()

    async def drain(self) -> None:
        """Waits until all prompts that routers have sent are computed, their states are read, and starts are
        handed over. Routers send no new prompts meanwhile."""
        give_up = time.monotonic() + DRAIN_S
        while await self._is_needed() and time.monotonic() < give_up:
            await asyncio.sleep(DRAIN_POLL_S)

    async def _is_needed(self) -> bool:
        return self._is_busy or (await self.stats()).leases_held > 0

    @property
    def _is_busy(self) -> bool:
        """Whether a prompt is computed, or starts are handed over."""
        starts = self._exchange.starts
        return bool(self._calls) or (starts is not None and starts.is_handing_over)

    # --- calls, on the event loop ----------------------------------------------------------------

    async def prefill(self, message: PrefillRequest) -> AsyncGenerator[Answer, None]:
        """Computes N-1 tokens and answers with a ticket. A cancelled call gives all memory back."""
        request_id = message.request_id
        spans = PrefillSpans(self._tracing, message)
        if len(message.token_ids) < 2:
            raise InvalidRequestError(
                f"a prompt of {len(message.token_ids)} tokens leaves nothing to hand over; "
                "send it to the decode server without a ticket"
            )
        if request_id in self._calls:
            raise InvalidRequestError(f"request id {request_id!r} is in use; choose another")
        request = Request(
            request_id,
            list(message.token_ids),
            params=None,
            prompt_logprobs_wanted=message.prompt_logprobs,
            cache_salt=message.cache_salt,
            ticket=await self._usable(message.resume, message),
            session=message.session,
            neighbour=message.neighbour,
        )
        if request.ticket is not None:
            self._exchange.announce(request.ticket)
        answers: asyncio.Queue[Answer | TwinfangError] = asyncio.Queue()
        self._calls[request_id] = answers
        self._host.post(lambda: self._add(request))
        has_ended = False
        try:
            while not has_ended:
                answer = await answers.get()
                has_ended = not isinstance(answer, PrefillStarted)
                if isinstance(answer, TwinfangError):
                    spans.ended(None, answer.code)
                    raise answer
                if isinstance(answer, PrefillReply):
                    spans.ended(answer)
                yield answer
        finally:
            del self._calls[request_id]
            if not has_ended:
                self._host.post(lambda: self._abandon(request_id))
                spans.ended(None, "cancelled")
            if request.ticket is not None:
                self._exchange.forget(request.ticket)

    async def _usable(self, ticket: Ticket | None, message: PrefillRequest) -> Ticket | None:
        """Returns the ticket if the state that it names, kept for the beginning of the prompt, can be read.

        None: the whole prompt is computed, since the state can't be read or since the prompt's
        log-probabilities are wanted.
        """
        if ticket is None or message.prompt_logprobs is not None:
            return None
        num_blocks = self._engine.capacity.blocks_for(ticket.num_tokens)
        if ticket.num_tokens >= len(message.token_ids) or len(ticket.block_ids) != num_blocks:
            return None
        try:
            await self._exchange.peers.ensure(ticket)
        except TwinfangError as error:
            log.info("request %s: its conversation's state can't be read: %s", message.request_id, error)
            return None
        return ticket

    async def abandon(self, message: Abandon, _context: Any) -> Empty:
        self._host.post(lambda: self._abandon(message.request_id))
        return Empty()

    async def stats(self) -> ServerStats:
        stats = await self._host.ask(lambda: self._exchange.stats())
        if not self._is_draining:
            return stats
        return replace(stats, drain="draining" if self._is_busy or stats.leases_held else "drained")

    async def set_draining(self, message: SetDraining) -> None:
        """Notes whether the server drains. No request moves: all prompts are still computed and read here.
        Cached prefixes are handed to the servers that the message names."""
        self._note_draining(message)
        self._streams.tell_of_drain()
        starts = self._exchange.starts
        if starts is not None and message.is_draining:
            starts.hand_over(message.heirs)
        elif starts is not None:
            await starts.keep()

    # --- events, on the engine's thread ----------------------------------------------------------

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except TwinfangError as error:
            self._host.answer(self._answer, request.request_id, error)

    def _abandon(self, request_id: str) -> None:
        """Stops computing a prompt that nobody will read. If the prompt is computed, ends its lease."""
        if self._engine.cancel(request_id) is None:
            self._exchange.end_lease(request_id)

    def _on_step(self, result: StepResult) -> None:
        for request in result.to_transfer:
            self._exchange.read(request)
        for output in result.outputs:
            if output.error is not None:
                error = error_from_code(output.error.code, output.error.message)
                self._host.answer(self._answer, output.request_id, error)
        for request in result.progressed:
            early = self._exchange.publish(request)
            if early is not None:
                self._host.answer(self._answer, request.request_id, PrefillStarted(early))
        for request in result.prefilled:
            self._exchange.lease(request, partial(self._answer_with, request, time.monotonic()))

    def read_ended(self, request: Request, result: TransferResult, outputs: list[RequestOutput]) -> None:
        """Lets the engine continue from the kept state. If this state could not be read, the whole prompt is
        computed.

        If bytes of the failed read may still land, the request fails instead.
        """
        if not outputs:
            return
        if result.settled:
            again = Request(
                request.request_id,
                request.tokens,
                params=None,
                cache_salt=request.cache_salt,
                session=request.session,
            )
            self._add(again)
        else:
            error = TransferError("reading the conversation's state took too long; send the request again")
            self._host.answer(self._answer, request.request_id, error)

    def lease_ended(self, lease: EndedLease) -> None:
        if lease.reason == "expired":
            kind = "a lease expired before it was read"
            lines.write(logging.WARNING, kind, "request %s: %s", lease.request_id, kind)

    # --- answers, back on the event loop ---------------------------------------------------------

    def _answer_with(self, request: Request, computed_s: float, ticket: Ticket) -> None:
        reply = PrefillReply(
            ticket=ticket,
            prompt_logprobs=None
            if request.prompt_logprobs_wanted is None
            else tuple(request.prompt_logprobs),
            cached_tokens=request.measured.num_cached,
            queue_s=request.measured.admitted_s - request.measured.arrived_s,
            prefill_s=computed_s - request.measured.admitted_s,
        )
        self._answer(request.request_id, reply)

    def _answer(self, request_id: str, answer: Answer | TwinfangError) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            call.put_nowait(answer)
