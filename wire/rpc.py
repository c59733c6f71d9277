"""gRPC methods of the servers, with msgpack messages instead of generated code.

One constant for each method names its request and its reply. From these constants servers build generic
handlers and clients build callables. Both sides validate received messages with :mod:`wire.codec`. An error
on the server is sent as :class:`ErrorReply` and raised again on the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, runtime_checkable
from urllib.parse import unquote

import grpc
import grpc.aio
import msgpack

from wire.codec import MAX_MESSAGE_BYTES, decode, encode
from wire.errors import (
    DeadlineError,
    TwinfangError,
    UnavailableError,
    UnreachableError,
    WireError,
    error_from_code,
)
from wire.messages.generation import (
    Cancel,
    ConnectPeers,
    Describe,
    DrainNews,
    Empty,
    ErrorReply,
    GetStats,
    PrefillNews,
    PrefillRequest,
    ServerInfo,
    ServerStats,
    SetDraining,
    StepNews,
    Submit,
)
from wire.messages.handoff import (
    Abandon,
    EndLease,
    Follow,
    HandshakeReply,
    HandshakeRequest,
    Progress,
    RenewedLeases,
    RenewLeases,
    Ticket,
)
from wire.messages.neighbours import BorrowReply, BorrowStart, OfferReply, OfferStart
from wire.messages.prefixes import GetPrefixes, PrefixNews
from wire.messages.purge import PurgeNews, PurgePrefixes
from wire.messages.sessions import SessionNews, TendSession
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

T = TypeVar("T")

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the default would notice a frozen peer only after 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
"""For servers and clients alike: message limits and dead-peer detection."""

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    # Keeps the data in flight to a busy client small: outputs that wait at the server leave as one message.
    ("grpc.http2.lookahead_bytes", 32 << 10),
    ("grpc.http2.bdp_probe", 0),
    # gRPC's default backoff grows to two minutes: a server that is back would not be noticed for that long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Otherwise channels to one address share their backoff, even with an earlier client of this process.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS = [
    *CHANNEL_OPTIONS,
    # With reuseport, a port that is in use would get a second listener; without it, binding fails.
    ("grpc.so_reuseport", 0),
    # A connection that has not shaken hands by then is closed. The default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
]


@dataclass(frozen=True)
class Method:
    """A unary method: its path, and the classes of its request and its reply."""

    service: str
    name: str
    request: type
    reply: type

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


@dataclass(frozen=True)
class StreamMethod:
    """A method with one request and several replies; ``replies`` are the classes a reply may have."""

    service: str
    name: str
    request: type
    replies: tuple[type, ...]

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


PREFILL_SERVICE = "twinfang.Prefill"
DECODE_SERVICE = "twinfang.Decode"
TRANSFER_SERVICE = "twinfang.Transfer"
"""Offered by every server whose memory other servers may read."""
SERVER_SERVICE = "twinfang.Server"

FOLLOW = StreamMethod(TRANSFER_SERVICE, "Follow", Follow, (Progress, Ticket))
END_LEASE = Method(TRANSFER_SERVICE, "EndLease", EndLease, Empty)
RENEW_LEASES = Method(TRANSFER_SERVICE, "RenewLeases", RenewLeases, RenewedLeases)
BORROW_START = Method(TRANSFER_SERVICE, "BorrowStart", BorrowStart, BorrowReply)
OFFER_START = Method(TRANSFER_SERVICE, "OfferStart", OfferStart, OfferReply)
ABANDON = Method(PREFILL_SERVICE, "Abandon", Abandon, Empty)
HANDSHAKE = Method(TRANSFER_SERVICE, "Handshake", HandshakeRequest, HandshakeReply)
DESCRIBE = Method(SERVER_SERVICE, "Describe", Describe, ServerInfo)
GET_STATS = Method(SERVER_SERVICE, "GetStats", GetStats, ServerStats)
GET_PREFIXES = Method(SERVER_SERVICE, "GetPrefixes", GetPrefixes, PrefixNews)
SET_DRAINING = Method(SERVER_SERVICE, "SetDraining", SetDraining, Empty)
TEND_SESSION = Method(SERVER_SERVICE, "TendSession", TendSession, SessionNews)
PURGE = Method(SERVER_SERVICE, "Purge", PurgePrefixes, PurgeNews)

MAX_CALL_BYTES = 1 << 20
"""Most bytes of the request of a single call, such as a renewal of some ten thousand leases. A server unpacks
them on its event loop: a MiB that is nothing but empty lists takes it a quarter of a second."""
LONG_BYTES = 64 << 10
"""Decoding a longer message takes longer than the event loop's other tasks should wait. Several long messages
may arrive in one turn of the loop, for example the prompts' log-probabilities of many choices."""

_reader = ThreadPoolExecutor(1, thread_name_prefix="long-messages")
"""Only one thread, since each further thread would take interpreter time from the event loop's thread."""

STREAM_PATH = f"/{DECODE_SERVICE}/Stream"
"""Bidirectional: clients send ``Submit``, ``Cancel`` and ``ConnectPeers``, servers ``StepNews`` and
``DrainNews``. Clients may send messages together (:mod:`wire.gathered`)."""
PREFILL_PATH = f"/{PREFILL_SERVICE}/Stream"
"""Bidirectional: clients send ``PrefillRequest`` and ``Cancel``, servers ``PrefillNews`` and ``DrainNews``.
Both sides may send messages together (:mod:`wire.gathered`)."""

StreamRequest = Submit | Cancel | ConnectPeers


def decode_stream_request(data: bytes) -> StreamRequest:
    return cast(StreamRequest, decode(data, Submit, Cancel, ConnectPeers))


def decode_prefill_request(data: bytes) -> PrefillRequest | Cancel:
    return cast(PrefillRequest | Cancel, decode(data, PrefillRequest, Cancel))


def decode_prefill_reply(data: bytes) -> PrefillNews | DrainNews:
    return cast(PrefillNews | DrainNews, decode(data, PrefillNews, DrainNews))


def requested_id(data: bytes, kind: type[Submit | PrefillRequest]) -> str | None:
    """Returns the request id of a message of ``kind`` that can't be decoded: its sender waits for a reply to
    that id.

    Returns None if the message has no readable id either.
    """
    try:
        _, name, (request_id, *_) = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return None
    return request_id if name == kind.__name__ and isinstance(request_id, str) else None


async def read_long(read: Callable[[bytes], T], data: bytes) -> T:
    """Returns ``read(data)``. Long messages are read in another thread, one message after the other.

    A prompt's log-probabilities, for example, are one message that can't be divided and may take a second.
    """
    if len(data) <= LONG_BYTES:
        return read(data)
    return await asyncio.get_running_loop().run_in_executor(_reader, read, data)


def decode_stream_reply(data: bytes) -> StepNews | DrainNews:
    return cast(StepNews | DrainNews, decode(data, StepNews, DrainNews))


def unary_handler(
    method: Method, serve: Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler that decodes, calls ``serve(request, context)`` and encodes its reply or error."""

    async def handle(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            return encode(await serve(_request_of(method, data), context))
        except Exception as error:
            return encode(_error_reply(method, error, context))

    return grpc.unary_unary_rpc_method_handler(handle)


def replies_handler(
    method: StreamMethod, serve: Callable[[Any], AsyncGenerator[Any, None]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler that sends all that ``serve(request)`` yields, and last its error if it raises one.

    If the call is cancelled, the generator ends at once.
    """

    async def handle(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            async with aclosing(serve(_request_of(method, data))) as replies:
                async for reply in replies:
                    await context.write(encode(reply))
        except Exception as error:
            await context.write(encode(_error_reply(method, error, context)))

    return grpc.unary_stream_rpc_method_handler(handle)


def _request_of(method: Method | StreamMethod, data: bytes) -> Any:
    if len(data) > MAX_CALL_BYTES:
        raise WireError(
            f"a request of {len(data)} bytes to {method.name} exceeds the limit of {MAX_CALL_BYTES}"
        )
    return decode(data, method.request)


def tell_of_unreadable(name: str, context: grpc.aio.ServicerContext[Any, Any], error: TwinfangError) -> None:
    """Logs the sender of an unreadable message. Most likely the sender has another version, or isn't a part
    of Twinfang."""
    peer = unquote(context.peer())
    host = peer.rpartition(":")[0]  # without the port, which differs with each connection
    lines.write(logging.WARNING, f"{name} from {host}", "%s from %s: %s", name, peer, error)


def _error_reply(
    method: Method | StreamMethod, error: Exception, context: grpc.aio.ServicerContext[Any, Any]
) -> ErrorReply:
    if isinstance(error, WireError):
        tell_of_unreadable(method.name, context, error)
    return error_reply(error, method.path)


def error_reply(error: Exception, path: str) -> ErrorReply:
    """Returns the reply for an error of a method. Logs an error that nobody expected."""
    if isinstance(error, TwinfangError):
        return ErrorReply(error.code, error.message)
    log.error("%s failed", path, exc_info=error)
    return ErrorReply("internal_error", f"{path.rpartition('/')[2]}: {type(error).__name__}: {error}")


def stream_handler(
    serve: Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext[Any, Any]], AsyncIterator[bytes]],
) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler of a bidirectional stream. Messages stay bytes, so that ``serve`` can answer a bad
    one."""
    return grpc.stream_stream_rpc_method_handler(serve)


def service(
    name: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
) -> grpc.GenericRpcHandler[Any, Any]:
    """Returns the generic handler of one service, from its handlers by method name."""
    return grpc.method_handlers_generic_handler(name, handlers)


@runtime_checkable
class Advising(Protocol):
    """A channel that knows why it may not reach its server."""

    def advice(self, details: str) -> str:
        """Return the end of a message about a call that failed with gRPC's ``details``; may be empty."""


def open_channel(address: str) -> grpc.aio.Channel:
    """Returns a channel to ``host:port``. It connects on first use, and again after a failure."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


async def call(channel: grpc.aio.Channel, method: Method, request: Any, *, timeout_s: float) -> Any:
    """Makes one unary call and returns the reply. Raises the error that the server raised.

    Raises :class:`UnreachableError` if the server can't be reached, :class:`DeadlineError` if it does not
    answer within ``timeout_s`` seconds, and :class:`UnavailableError` if gRPC reports another failure, for
    example of a server that does not know the method. Cancelling the awaiting task cancels the call on the
    server.
    """
    stub = channel.unary_unary(method.path)
    try:
        data = await stub(encode(request), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise _fault_of(method, error, timeout_s, channel) from error
    return _reply_in(data, method.reply)


async def call_for_replies(
    channel: grpc.aio.Channel, method: StreamMethod, request: Any, *, timeout_s: float | None
) -> AsyncGenerator[Any, None]:
    """Yields the replies of one call as they come. Closing the generator cancels the call.

    Raises the same errors as :func:`call`.
    """
    replies: Any = channel.unary_stream(method.path)(encode(request), timeout=timeout_s)
    try:
        while (data := await replies.read()) is not grpc.aio.EOF:
            yield await read_long(lambda data: _reply_in(data, *method.replies), data)
    except grpc.aio.AioRpcError as error:
        raise _fault_of(method, error, timeout_s, channel) from error
    finally:
        replies.cancel()


def _fault_of(
    method: Method | StreamMethod,
    error: grpc.aio.AioRpcError,
    timeout_s: float | None,
    channel: grpc.aio.Channel,
) -> TwinfangError:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{method.name} got no answer within {timeout_s} s")
    advice = channel.advice(error.details() or "") if isinstance(channel, Advising) else ""
    kind = UnreachableError if error.code() is grpc.StatusCode.UNAVAILABLE else UnavailableError
    return kind(f"{method.name} failed: {error.code().name}: {error.details()}{advice}")


def _reply_in(data: bytes, *expected: type) -> Any:
    reply = decode(data, *expected, ErrorReply)
    if isinstance(reply, ErrorReply):
        raise error_from_code(reply.code, reply.message)
    return reply
