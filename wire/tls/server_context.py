"""What a server's TLS connections are set up with, by Python's ssl module."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence

from wire.errors import ConfigError
from wire.tls.key_pair import KeyPair


class ServerContext:
    """A server's TLS settings, whose certificate can be replaced while connections are open.

    Servers keep :attr:`ssl` for their whole life. It has no certificate itself, but gives each new connection
    the newest one; open connections keep theirs. Loading a new certificate into the same object would not do:
    OpenSSL keeps one certificate for each kind of key, so that one of another kind would stand beside the old
    one.
    """

    def __init__(self, protocols: Sequence[str] = (), *, asks_callers: bool = False) -> None:
        """``protocols``: names for ALPN. ``asks_callers``: callers may show a certificate of the pair's
        authorities; TLS is 1.3. No connection may come before the first call of :meth:`use`."""
        self._asks_callers = asks_callers
        self.ssl = self._context()
        if protocols:
            self.ssl.set_alpn_protocols(list(protocols))
        self.ssl.sni_callback = self._give_newest
        self._newest = self.ssl

    def use(self, pair: KeyPair) -> None:
        """Use ``pair`` for new connections. Raises :class:`ConfigError`; then nothing changes."""
        context = self._context()
        try:
            load(context, pair.private_key + pair.certificates)
            if self._asks_callers:
                context.load_verify_locations(cadata=pair.authorities.decode())
        except ssl.SSLError as error:
            raise ConfigError(f"OpenSSL refuses the certificate or its key: {error.reason}") from error
        self._newest = context

    def _give_newest(self, connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # a client could have us compute handshakes without an end
        if self._asks_callers:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_OPTIONAL
            # With a ticket, a caller would be believed without another look at its certificate, also when
            # that has expired or its authority is no longer trusted.
            context.num_tickets = 0
        return context


def load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a key and certificates that are in memory. The ssl module takes only paths, so they go into a file
    that has no name and no place on a disk."""
    file = os.memfd_create("key-pair", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(file), "wb") as writing:
            writing.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
