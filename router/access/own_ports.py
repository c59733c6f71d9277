"""TLS of the loopback ports by which the processes of one router reach each other."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wire.tls.identity import Identity
    from wire.tls.key_pair import KeyPair


@dataclass(frozen=True)
class OwnPorts:
    """How the ports are served and called. Callers show the secret of the processes, not a certificate."""

    served: ssl.SSLContext | None = None
    """None: by HTTP."""
    called: ssl.SSLContext | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.called is None else "https"

    @classmethod
    def of(cls, identity: Identity | None) -> OwnPorts:
        """Return plain ports without mutual TLS. New files of the identity are used for new connections."""
        if identity is None:
            return cls()
        from wire.tls.server_context import ServerContext

        served = ServerContext(asks_callers=True)
        called = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        called.check_hostname = False  # the certificate is not for loopback
        called.minimum_version = ssl.TLSVersion.TLSv1_3

        def trust(pair: KeyPair) -> None:
            called.load_verify_locations(cadata=pair.authorities.decode())

        identity.on_change(served.use)
        identity.on_change(trust)
        return cls(served.ssl, called)


PLAIN = OwnPorts()
