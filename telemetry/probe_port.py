"""A server's HTTP port for operators: ``/metrics``, ``/healthz``, ``/readyz``.

A separate thread answers. So the port answers even while the model is loaded or the event loop is busy, and
a liveness probe does not end a server that is only slow.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from wire.errors import ConfigError
from wire.http.cross_site import AllowedHosts, is_of_another_site
from wire.repeated_lines import RepeatedLines
from wire.tls.peer_names import ROLES

if TYPE_CHECKING:
    from wire.tls.identity import Identity

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

CLIENT_TIMEOUT_S = 5.0
"""A client that sends or takes nothing for this long is disconnected."""

_NAMES = "twinfang.names"
"""In WSGI's environ: the DNS names of the caller's certificate; empty without one."""

StartResponse = Callable[..., Any]


class ProbePort:
    """Listens as soon as it is created. ``not_ready`` returns why no requests are served, None if they are.
    ``hang`` returns what in the process hangs, None if nothing does."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        not_ready: Callable[[], str | None],
        *,
        hang: Callable[[], str | None] = lambda: None,
        flag: str = "--metrics-port",
        identity: Identity | None = None,
    ) -> None:
        """``identity``: speak HTTPS, and show metrics only to callers whose certificate gives them a role. A
        kubelet has none; the probes tell nothing else than health."""
        self._metrics = make_wsgi_app(registry)
        self._allowed_hosts = AllowedHosts.of(host)
        self._not_ready = not_ready
        self._hang = hang
        try:
            self._server = make_server(host, port, self._answer, _server_class(host), _Handler)
        except OSError as error:
            raise ConfigError(
                f"{flag} {port}: can't listen on {host}:{port}: {error.strerror}; "
                f"choose another {flag}, or 0 for none"
            ) from error
        self.port = self._server.server_port
        self.scheme = "http"
        self._roles = None if identity is None else identity.names
        if identity is not None:
            self.scheme = "https"
            # Its library takes a while to import, which a process without TLS is spared.
            from wire.tls.server_context import ServerContext

            context = ServerContext(asks_callers=True)
            identity.on_change(context.use)
            self._server.socket = context.ssl.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        refusal = self._refusal(environ)
        if refusal is not None:
            return _say(start_response, *refusal)
        if environ["REQUEST_METHOD"] == "HEAD":
            return self._head(environ, start_response)
        return self._get(environ, start_response)

    def _refusal(self, environ: dict[str, Any]) -> tuple[str, str] | None:
        """Return status and text for requests that a page of another site makes a browser send. None for
        other requests."""

        def header(name: str) -> str | None:
            return environ.get("HTTP_" + name.upper().replace("-", "_"))

        host = header("host")
        if self._allowed_hosts is not None and host is not None and not self._allowed_hosts.takes(host):
            return "403 Forbidden", (
                f"this port listens on loopback and does not go by the name {host[:80]!r}: ask for it by "
                "127.0.0.1 or localhost, or have it listen on an address that others reach (--host)"
            )
        if is_of_another_site(environ["REQUEST_METHOD"], header):
            return "403 Forbidden", "pages of other sites may not send requests here"
        return None

    def _head(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer with the status and headers of a GET, including the length of its body."""
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start_get(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
            started.append((status, headers))

        body = b"".join(self._get({**environ, "REQUEST_METHOD": "GET"}, start_get))
        status, headers = started[0]
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return []

    def _get(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            if self._roles is not None and not self._roles.roles(environ[_NAMES]):
                names = " or ".join(map(self._roles.name, ROLES))
                return _say(
                    start_response,
                    "403 Forbidden",
                    "metrics are for callers with a certificate of an authority in --tls-ca, with "
                    f"{names} among its subjectAltNames: send one",
                )
            page: Iterable[bytes] = self._metrics(environ, start_response)
            return page
        if path == "/healthz":
            hang = self._hang()
            if hang is not None:  # a kubelet's event has the status alone
                lines.write(logging.ERROR, "hang", "%s; /healthz says so with status 503", hang)
            return _say(start_response, "503 Service Unavailable" if hang else "200 OK", hang or "ok")
        if path == "/readyz":
            reason = self._not_ready()
            return _say(start_response, "503 Service Unavailable" if reason else "200 OK", reason or "ready")
        return _say(start_response, "404 Not Found", "there are /metrics, /healthz and /readyz")


def _say(start_response: StartResponse, status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def get_environ(self) -> dict[str, Any]:
        environ = super().get_environ()
        found = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        alternatives: Any = (found or {}).get("subjectAltName", ())
        environ[_NAMES] = [name for kind, name in alternatives if kind == "DNS"]
        return environ

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class _Server(ThreadingWSGIServer):
    def server_bind(self) -> None:
        # As in WSGIServer, but without the look-up of the host's name, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a probe or a scrape from %s was cut off", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_class(host: str) -> type[WSGIServer]:
    return _Server6 if ":" in host else _Server
