"""A host and a port, as written in the ``Host`` header and after the ``//`` of an origin."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True)
class Authority:
    """A host and a port in canonical form. A port that is not given differs from the default port."""

    host: str
    """In lower case; an IPv6 address has no brackets here."""
    port: int | None
    """None: the scheme's default port."""

    @classmethod
    def parse(cls, text: str) -> Authority | None:
        """Parses ``host`` or ``host:port``; None for any other text."""
        found = HOST_PORT.fullmatch(text)
        if found is None:
            return None
        host, port = found["host"].lower().removesuffix("."), found["port"]
        if host.startswith("["):
            try:
                host = str(ipaddress.IPv6Address(host[1:-1]))
            except ValueError:
                return None
        if not host or (port is not None and int(port) > 65535):
            return None
        return cls(host, None if port is None else int(port))
