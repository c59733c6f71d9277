"""Servers that exchange the wire's messages over real gRPC and answer as a test tells them.

They test the router's behaviour when streams break or servers refuse.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc.aio

from prefill_server.stream import RouterStreams
from wire.codec import encode
from wire.errors import TwinfangError, UnavailableError
from wire.gathered import messages_in
from wire.health import Health
from wire.http.address import host_port
from wire.messages.generation import (
    Cancel,
    DrainNews,
    Empty,
    ErrorReply,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    RequestOutput,
    RequestStats,
    ServerInfo,
    ServerStats,
    SetDraining,
    Submit,
    TokenLogprobs,
)
from wire.messages.handoff import Abandon, PartialTicket, Ticket
from wire.messages.prefixes import PrefixNews
from wire.messages.purge import PurgeNews, PurgePrefixes
from wire.messages.sessions import SessionNews, TendSession
from wire.outbox import Outbox
from wire.rpc import (
    ABANDON,
    DECODE_SERVICE,
    DESCRIBE,
    GET_PREFIXES,
    GET_STATS,
    PREFILL_SERVICE,
    PURGE,
    SERVER_OPTIONS,
    SERVER_SERVICE,
    SET_DRAINING,
    TEND_SESSION,
    StreamRequest,
    decode_stream_request,
    service,
    stream_handler,
    unary_handler,
)

VOCAB_SIZE, MAX_MODEL_LEN = 400, 256

Send = Callable[..., None]
"""Sends the outputs of one step."""
DecodeScript = Callable[[Submit, Send], Awaitable[None]]
PrefillScript = Callable[[PrefillRequest], Awaitable[PrefillReply]]


def server_info(role: str, **changes: Any) -> ServerInfo:
    fields: dict[str, Any] = {
        "role": role,
        "incarnation": f"{role}-1",
        "served_model_name": "tiny",
        "fingerprint": "f",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 16,
        "max_num_seqs": 8,
        "eos_token_ids": (2,),
    }
    return ServerInfo(**(fields | changes))


def server_stats(**changes: Any) -> ServerStats:
    """Returns the stats of an idle server, with ``changes``."""
    without_default = (f.name for f in dataclasses.fields(ServerStats) if f.default is dataclasses.MISSING)
    figures: dict[str, Any] = dict.fromkeys(without_default, 0)
    return ServerStats(**(figures | {"leases_ended": {}, "transfer_failures": {}} | changes))


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple((10 + i, -0.5 - i) for i in range(num_top))
    return TokenLogprobs(token_id=token_id, logprob=-0.25, rank=1, top=top)


def saying(token_ids: list[int], *, per_step: int = 1, ends: bool = False) -> DecodeScript:
    """Answers with ``token_ids``, ``per_step`` at a time, up to max_tokens.

    ``ends``: the last token stops the answer, like the end of sequence.
    """

    async def script(submit: Submit, send: Send) -> None:
        wanted = token_ids[: submit.params.max_tokens]
        for start in range(0, len(wanted), per_step):
            step = tuple(wanted[start : start + per_step])
            is_last = start + per_step >= len(wanted)
            stops = ends and is_last and len(wanted) == len(token_ids)
            num_top = submit.params.logprobs
            send(
                RequestOutput(
                    submit.request_id,
                    step,
                    logprobs=None if num_top is None else tuple(logprobs_of(t, num_top) for t in step),
                    finish_reason=("stop" if stops else "length") if is_last else None,
                    stop_token_id=step[-1] if stops else None,
                    stats=RequestStats(0.001, 0.002, 1000, 3, 0) if is_last else None,
                )
            )
            await asyncio.sleep(0)

    return script


def failing(error: TwinfangError, *, after: tuple[int, ...] = ()) -> DecodeScript:
    async def script(submit: Submit, send: Send) -> None:
        if after:
            send(RequestOutput(submit.request_id, after))
            await asyncio.sleep(0.01)
        reply = ErrorReply(error.code, error.message)
        send(RequestOutput(submit.request_id, (), finish_reason="error", error=reply))

    return script


async def hanging(submit: Submit, send: Send) -> None:
    """Sends one token and nothing more."""
    send(RequestOutput(submit.request_id, (50,)))


async def silent(submit: Submit, send: Send) -> None:
    """Sends nothing at all."""


def drain_news(info: ServerInfo) -> DrainNews:
    return DrainNews(info.is_draining, info.incarnation)


@dataclass
class Scripted:
    """The common parts of prefill and decode servers: a port, an identity, start and stop."""

    info: ServerInfo
    port: int = 0
    host: str = "127.0.0.1"
    stats: ServerStats | None = field(default_factory=server_stats)
    """If None, GetStats is never answered."""
    prefixes: PrefixNews = field(default_factory=lambda: PrefixNews(1, True))
    has_health: bool = False
    """Whether the server has gRPC's standard health service."""
    health: Health | None = None
    server: grpc.aio.Server | None = None
    tended: list[TendSession] = field(default_factory=list)
    """TendSession calls so far."""
    session_news: SessionNews | None = field(default_factory=lambda: SessionNews(0, 0))
    """The answer to TendSession. None: the call fails."""
    unknown_calls: ClassVar[frozenset[str]] = frozenset()
    """Names of calls that the server does not know, as one of an earlier release."""
    purges: list[PurgePrefixes] = field(default_factory=list)
    """Purge calls so far."""
    purge_news: PurgeNews | None = field(default_factory=lambda: PurgeNews(0, 0, 0))
    """The answer to Purge. None: the call fails."""
    may_purge: asyncio.Event = field(default_factory=asyncio.Event)
    """Purge is answered once this is set; it is set at first."""
    drains: list[SetDraining] = field(default_factory=list)
    may_drain: asyncio.Event = field(default_factory=asyncio.Event)
    """SetDraining is answered once this is set; it is set at first."""
    may_speak: asyncio.Event = field(default_factory=asyncio.Event)
    """Describe and GetStats are answered while this is set; it is set at first."""
    num_described: int = 0
    """Number of Describe calls so far."""

    def __post_init__(self) -> None:
        for event in (self.may_purge, self.may_drain, self.may_speak):
            event.set()

    def freeze(self) -> None:
        """Stops answering; its port stays open."""
        self.may_speak.clear()

    def thaw(self) -> None:
        self.may_speak.set()

    @property
    def address(self) -> str:
        return host_port(self.host, self.port)

    async def start(self) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self.server.add_generic_rpc_handlers(tuple(self.handlers()))
        if self.has_health:
            self.health = Health(self.server)
            await self.health.set("serving")

        async def describe(_request: Any, _context: Any) -> ServerInfo:
            self.num_described += 1
            await self.may_speak.wait()
            return self.info

        async def get_stats(_request: Any, _context: Any) -> ServerStats:
            await self.may_speak.wait()
            if self.stats is None:
                await asyncio.Event().wait()
            return self.stats

        async def get_prefixes(_request: Any, _context: Any) -> PrefixNews:
            return self.prefixes

        async def set_draining(request: SetDraining, _context: Any) -> Empty:
            self.drains.append(request)
            await self.may_drain.wait()
            self.info = dataclasses.replace(self.info, is_draining=request.is_draining)
            return Empty()

        async def tend_session(request: TendSession, _context: Any) -> SessionNews:
            self.tended.append(request)
            if self.session_news is None:
                raise UnavailableError("not today")
            return self.session_news

        async def purge(request: PurgePrefixes, _context: Any) -> PurgeNews:
            self.purges.append(request)
            await self.may_purge.wait()
            if self.purge_news is None:
                raise UnavailableError("not today")
            return self.purge_news

        methods = {
            PURGE.name: unary_handler(PURGE, purge),
            SET_DRAINING.name: unary_handler(SET_DRAINING, set_draining),
            GET_PREFIXES.name: unary_handler(GET_PREFIXES, get_prefixes),
            DESCRIBE.name: unary_handler(DESCRIBE, describe),
            GET_STATS.name: unary_handler(GET_STATS, get_stats),
            TEND_SESSION.name: unary_handler(TEND_SESSION, tend_session),
        }
        for name in self.unknown_calls:
            del methods[name]
        self.server.add_generic_rpc_handlers((service(SERVER_SERVICE, methods),))
        self.port = self.server.add_insecure_port(self.address)
        await self.server.start()

    async def stop(self) -> None:
        """Stops as abruptly as a crash."""
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        raise NotImplementedError


@dataclass
class ScriptedDecode(Scripted):
    script: DecodeScript = silent
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    send: Send = lambda *outputs: None
    """Sends outputs on the most recently opened stream. A script gets a ``send`` for its own stream."""
    num_streams: int = 0
    """Number of open streams."""

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        return [service(DECODE_SERVICE, {"Stream": stream_handler(self.stream)})]

    async def stream(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        handles: dict[str, int] = {}

        def send(*outputs: RequestOutput) -> None:
            outgoing.put_nowait(encode(Outbox(outputs).take().news(handles)))

        self.send = send
        outgoing.put_nowait(encode(drain_news(self.info)))

        def take(message: StreamRequest) -> None:
            if isinstance(message, Submit):
                for choice in (message, *message.forked()):
                    handles[choice.request_id] = choice.handle
                    self.submitted.append(choice)
                    tasks.append(asyncio.create_task(self.script(choice, send)))
            elif isinstance(message, Cancel):
                self.cancelled.append(message.request_id)
            else:
                self.peers += message.addresses

        async def read() -> None:
            async for data in requests:
                for one in messages_in(data):
                    take(decode_stream_request(one))

        tasks.append(asyncio.create_task(read()))
        self.num_streams += 1
        try:
            while True:
                yield await outgoing.get()
        finally:
            self.num_streams -= 1
            for task in tasks:
                task.cancel()


@dataclass
class ScriptedPrefill(Scripted):
    script: PrefillScript | None = None
    requests: list[PrefillRequest] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    num_cancelled: int = 0
    starts_early: bool = False
    """Whether an early ticket comes before each reply."""

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        self.streams = RouterStreams(self.prefill, lambda: drain_news(self.info))
        methods = {
            "Stream": stream_handler(self.streams.handle),
            ABANDON.name: unary_handler(ABANDON, self.abandon),
        }
        return [service(PREFILL_SERVICE, methods)]

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillStarted | PrefillReply, None]:
        self.requests.append(request)
        try:
            if self.starts_early:
                yield PrefillStarted(self.early_ticket(request))
            yield await self.script(request) if self.script else self.reply(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def drained_elsewhere(self, is_draining: bool) -> None:
        """Begins or ends a drain as another router would."""
        self.info = dataclasses.replace(self.info, is_draining=is_draining)
        self.streams.tell_of_drain()

    def early_ticket(self, request: PrefillRequest) -> PartialTicket:
        num_tokens = len(request.token_ids) - 1
        fields = (request.request_id, len(self.requests), 1, self.address, self.info.incarnation, num_tokens)
        return PartialTicket(*fields, ttl_s=30.0)

    def reply(self, request: PrefillRequest) -> PrefillReply:
        wanted = request.prompt_logprobs
        rest = request.token_ids[1:]
        return PrefillReply(
            ticket=Ticket(
                request_id=request.request_id,
                lease_id=len(self.requests),
                epoch=1,
                address=self.address,
                incarnation=self.info.incarnation,
                num_tokens=len(request.token_ids) - 1,
                block_ids=(1,),
                state_slot=1,
                ttl_s=30.0,
            ),
            prompt_logprobs=None if wanted is None else tuple(logprobs_of(t, wanted) for t in rest),
            cached_tokens=4,
            queue_s=0.001,
            prefill_s=0.002,
        )

    async def abandon(self, message: Abandon, _context: Any) -> Empty:
        self.abandoned.append(message.request_id)
        return Empty()
