"""Who may call which service of a gRPC server with mutual TLS, by the role in the caller's certificate.

TLS has checked the certificate when the connection began. Each call checks what can change later: whether the
certificate has expired, and whether its authority is still trusted. Streams that are open when an authority
is no longer trusted are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from wire.repeated_lines import RepeatedLines
from wire.rpc import DECODE_SERVICE, PREFILL_SERVICE, SERVER_SERVICE, TRANSFER_SERVICE
from wire.tls.identity import Identity
from wire.tls.key_pair import KeyPair
from wire.tls.peer_certificate import PeerCertificate
from wire.tls.peer_names import PeerRole

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

MAY_CALL: dict[str, tuple[PeerRole, ...]] = {
    PREFILL_SERVICE: ("router",),
    DECODE_SERVICE: ("router",),
    TRANSFER_SERVICE: ("server",),
    SERVER_SERVICE: ("router", "operator"),
}
"""Any certificate of the authority may ask the health service, whatever its names: it only says whether a
server serves. NIXL's metadata, addresses of memory and the progress of prompts are in replies of the transfer
service; tickets are in those of the prefill service and in requests to the decode service."""

MAX_CERTIFICATES = 1000
"""Most certificates and connections that are remembered."""
HANDSHAKE_S = 5.0
"""A connection without a call for this long after its beginning counts as refused by TLS."""


@dataclass(frozen=True, eq=False)
class _Call:
    task: asyncio.Task[Any]
    context: Any
    certificate: PeerCertificate
    peer: str

    async def end(self, problem: str) -> None:
        """End the call with ``problem``. A cancelled task alone would leave its caller waiting."""
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):  # the second: it has ended
            await self.context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
        self.task.cancel()


class Callers:
    """The callers of one server. Used on the event loop."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._names = identity.names
        self._authorities = b""
        self._certificates: OrderedDict[bytes, PeerCertificate] = OrderedDict()
        self._calls: set[_Call] = set()
        self._endings: set[asyncio.Future[None]] = set()
        self._connections = _Connections()
        identity.on_change(self._trust)

    def guarded(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return handlers that refuse callers who may not call ``service``."""
        return {name: self._guarded(service, handler) for name, handler in handlers.items()}

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a port of gRPC is opened with. Its certificate follows the identity's."""
        served = self._identity.current

        def newest() -> Any:
            """Called by gRPC, on its own threads, for each connection. None: nothing has changed."""
            nonlocal served
            self._connections.begun()
            if self._identity.current is served:
                return None
            served = self._identity.current
            return _configuration(served)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served), newest, require_client_authentication=True
        )

    def tell_refused(self) -> None:
        """Log that connections began whose callers TLS has refused. Called about once a second."""
        if number := self._connections.num_refused():
            lines.write(
                logging.WARNING,
                "refused TLS handshakes",
                "TLS refused %d caller(s): without a certificate, or with one that has expired or is not of "
                "an authority in `tls_ca`, or who refused ours; the caller's log names its address, and "
                "GRPC_VERBOSITY=INFO shows OpenSSL's reason",
                number,
            )

    def refusal(self, service: str, context: Any) -> str | None:
        """Return why the caller may not call ``service``; None if it may."""
        found = context.auth_context()
        peer = unquote(context.peer())
        self._connections.called(peer)
        certificate = self._certificate(found["x509_pem_cert"][0], found.get("x509_pem_cert_chain", [b""])[0])
        problem = certificate.problem(self._authorities, time.time())
        if problem is not None:
            return problem
        roles, allowed = self._names.roles(certificate.names), MAY_CALL[service]
        if not set(roles) & set(allowed):
            return (
                f"{service} is for {' and '.join(allowed)}, and the caller's certificate is for "
                f"{', '.join(certificate.names) or 'no name'}, "
                f"which is {'the role ' + ', '.join(roles) if roles else 'no role'}: the name "
                f"{self._names.name(allowed[0])!r} has to be among its subjectAltNames"
            )
        self._note(certificate, peer, context)
        return None

    def _guarded(
        self, service: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        make: dict[tuple[bool, bool], tuple[Callable[..., Any], Any]] = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        as_handler, behaviour = make[handler.request_streaming, handler.response_streaming]
        guarded: grpc.RpcMethodHandler[Any, Any] = as_handler(_Guarded(behaviour, self, service))
        return guarded

    def _certificate(self, pem: bytes, chain: bytes) -> PeerCertificate:
        known = self._certificates.get(pem)
        if known is None:
            known = self._certificates[pem] = PeerCertificate.read(pem, chain)
            if len(self._certificates) > MAX_CERTIFICATES:
                self._certificates.popitem(last=False)
        return known

    def _note(self, certificate: PeerCertificate, peer: str, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        call = _Call(task, context, certificate, peer)
        self._calls.add(call)
        task.add_done_callback(lambda _: self._calls.discard(call))

    def _trust(self, pair: KeyPair) -> None:
        if pair.authorities == self._authorities:
            return
        self._authorities = pair.authorities
        for call in tuple(self._calls):
            problem = call.certificate.problem(self._authorities, time.time())
            if problem is not None:
                log.warning("a call from %s is ended: %s", call.peer, problem)
                ending = asyncio.ensure_future(call.end(problem))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)


class _Guarded(functools.partial[Any]):
    """A handler that first asks whether its caller may call it.

    gRPC looks through a partial function to see whether a handler is a generator. So a stream's messages do
    not pass through a further generator: the question costs once a call, and nothing a message.
    """

    _callers: Callers
    _service: str

    def __new__(cls, behaviour: Callable[..., Any], callers: Callers, service: str) -> _Guarded:
        made = super().__new__(cls, behaviour)
        made._callers, made._service = callers, service
        return made

    def __call__(self, request: Any, context: Any) -> Any:
        problem = self._callers.refusal(self._service, context)
        if problem is None:
            return self.func(request, context)
        peer = unquote(context.peer())
        host = peer.rpartition(":")[0]
        lines.write(
            logging.WARNING, f"refused call from {host}", "a call from %s is refused: %s", peer, problem
        )
        refuse = _refused_stream if inspect.isasyncgenfunction(self.func) else _refused
        return refuse(context, problem)


async def _refused(context: Any, problem: str) -> None:
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)


async def _refused_stream(context: Any, problem: str) -> AsyncGenerator[Any, None]:
    """What gRPC wants of a method with a stream of replies."""
    await _refused(context, problem)
    yield  # never reached, but it makes this a generator


class _Connections:
    """Counts connections that have begun, and those that have made a call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: list[float] = []
        self._known: OrderedDict[str, None] = OrderedDict()

    def begun(self) -> None:
        with self._lock:
            self._begun.append(time.monotonic())

    def called(self, peer: str) -> None:
        if peer in self._known:
            return
        self._known[peer] = None
        if len(self._known) > MAX_CERTIFICATES:
            self._known.popitem(last=False)
        with self._lock:
            del self._begun[:1]

    def num_refused(self) -> int:
        """Return the number of connections that made no call in time, and forget them."""
        before_s = time.monotonic() - HANDSHAKE_S
        with self._lock:
            late = sum(one < before_s for one in self._begun)
            del self._begun[:late]
        return late


def _configuration(pair: KeyPair) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(pair.private_key, pair.certificates)], root_certificates=pair.authorities
    )
