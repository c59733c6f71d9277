"""TLS settings of Python's sockets between processes of Twinfang. Both sides show a certificate."""

from __future__ import annotations

import ssl

from wire.errors import ConfigError
from wire.tls.key_pair import KeyPair
from wire.tls.server_context import load


def mutual_context(pair: KeyPair) -> ssl.SSLContext:
    """Return a server's settings. Raises :class:`ConfigError` if OpenSSL refuses ``pair``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _filled(context, pair)


def client_context(pair: KeyPair) -> ssl.SSLContext:
    """Return a client's settings. Raises :class:`ConfigError` if OpenSSL refuses ``pair``.

    Addresses are not compared: between processes, names say the role (:mod:`wire.tls.peer_names`).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _filled(context, pair)


def _filled(context: ssl.SSLContext, pair: KeyPair) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        load(context, pair.private_key + pair.certificates)
        context.load_verify_locations(cadata=pair.authorities.decode())
    except ssl.SSLError as error:
        raise ConfigError(
            f"OpenSSL refuses the certificate, its key or the authorities: {error.reason}"
        ) from error
    return context
