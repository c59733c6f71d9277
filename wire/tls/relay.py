"""TLS on a socket, for code that reads and writes a plain one."""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
from collections.abc import Callable

from wire.errors import ConfigError
from wire.http.address import host_port
from wire.tls.identity import Identity
from wire.tls.key_pair import names_of_der

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_BYTES = 1 << 20
"""Most bytes that wait in one direction. Then the side that sends has to wait."""
PART_BYTES = 1 << 16


def called(connection: socket.socket, identity: Identity) -> socket.socket:
    """Return the near end of a TLS connection over ``connection``, which this process has opened. Raises
    :class:`OSError` if the handshake fails, :class:`ConfigError` if no server of ours is there."""
    connection.settimeout(HANDSHAKE_S)
    far = identity.client_ssl().wrap_socket(connection)
    _require_server(far, identity)
    return _relayed(far)


def answered(connection: socket.socket, identity: Identity) -> socket.socket:
    """Return the near end of a TLS connection over ``connection``, which another process has opened. The
    handshake is made on another thread. If it fails, the near end is closed and the reason is logged."""
    ours, near = socket.socketpair()
    address = _address_of(connection)

    def shake_hands() -> None:
        far: socket.socket = connection
        try:
            connection.settimeout(HANDSHAKE_S)
            far = tls = identity.server_ssl().wrap_socket(connection, server_side=True)
            _require_server(tls, identity)
        except (OSError, ConfigError) as error:
            log.warning("%s called and is refused by TLS: %s", address, error)
            far.close()
            near.close()
            return
        _Relay(tls, near).run()

    threading.Thread(target=shake_hands, name="tls", daemon=True).start()
    return ours


def _require_server(far: ssl.SSLSocket, identity: Identity) -> None:
    certificate = far.getpeercert(binary_form=True)
    assert certificate is not None  # both contexts require one
    names = names_of_der(certificate)
    if "server" not in identity.names.roles(names):
        far.close()
        raise ConfigError(
            f"the other side's certificate is for {', '.join(names) or 'no name'}: a server's has to have "
            f"{identity.names.name('server')!r} among its subjectAltNames"
        )


def _relayed(far: ssl.SSLSocket) -> socket.socket:
    ours, near = socket.socketpair()
    threading.Thread(target=_Relay(far, near).run, name="tls", daemon=True).start()
    return ours


def _address_of(connection: socket.socket) -> str:
    try:
        return host_port(*connection.getpeername()[:2])
    except OSError:
        return "somebody who is gone"


class _Relay:
    """Carries bytes between a TLS connection and a socket pair, until one of the two closes. OpenSSL allows
    one thread to use a connection, and the pair's users are several."""

    def __init__(self, far: ssl.SSLSocket, near: socket.socket) -> None:
        self._far, self._near = far, near
        self._to_far, self._to_near = bytearray(), bytearray()

    def run(self) -> None:
        self._far.setblocking(False)
        self._near.setblocking(False)
        with selectors.DefaultSelector() as selector:
            far = selector.register(self._far, selectors.EVENT_READ)
            near = selector.register(self._near, selectors.EVENT_READ)
            try:
                while self._move():
                    selector.modify(self._far, _events(self._to_near, self._to_far))
                    selector.modify(self._near, _events(self._to_far, self._to_near))
                    selector.select()
            except OSError as error:
                log.debug("a TLS connection broke: %s", error)
            assert far.fd != near.fd
        self._far.close()
        self._near.close()

    def _move(self) -> bool:
        """Move what can be moved now. Return False at the end of either side, once all of it has arrived."""
        is_open = _fill(self._to_far, self._near.recv)
        _drain(self._to_far, self._far.send)
        is_open &= _fill(self._to_near, self._far.recv)
        _drain(self._to_near, self._near.send)
        return is_open


_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _fill(buffer: bytearray, receive: Callable[[int], bytes]) -> bool:
    """Read until there is nothing more, or no room. Return False at the end."""
    while len(buffer) < MAX_BYTES:
        try:
            part = receive(PART_BYTES)
        except _WAIT:
            return True
        if not part:
            return False
        buffer += part
    return True


def _drain(buffer: bytearray, send: Callable[[bytes], int]) -> None:
    while buffer:
        try:
            sent = send(bytes(buffer[:PART_BYTES]))
        except _WAIT:
            return
        del buffer[:sent]


def _events(received: bytearray, to_send: bytearray) -> int:
    # Reading stays on while there is room: without it a closed connection would not be noticed.
    return (selectors.EVENT_READ if len(received) < MAX_BYTES else 0) | (
        selectors.EVENT_WRITE if to_send else 0
    )
